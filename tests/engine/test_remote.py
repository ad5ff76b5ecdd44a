"""`engine=URL`: a graph runs on a ComfyUI: one that only speaks as ComfyUI does, and a real one where one is found."""

from __future__ import annotations

import json
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import comfyui_files as files
import numpy as np
import pytest
from comfyui_graphs import text_to_latent, with_picture
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
from ui_levels import of_everything

PICTURE = {"filename": "test_00001_.png", "subfolder": "sub", "type": "output"}


class Pretended:
    """ComfyUI's answers (as 0.33 gives them) to /prompt, /history, /view, /free, /interrupt, /queue, /object_info."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, Any]] = []
        self.refusal: dict[str, Any] | None = None
        self.messages: list[Any] = []
        self.status = "success"
        self.pictures = {"test_00001_.png": b"\x89PNG picture"}
        self.gone_until_freed = False
        self.pending = 2  # polls before the run is done

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method == "POST":
            self.posted.append((path, body))
        if path == "/prompt":
            return (400, self.refusal) if self.refusal else (200, {"prompt_id": "p1", "number": 1, "node_errors": {}})
        if path == "/history/p1":
            self.pending -= 1
            if self.pending >= 0:
                return 200, {}
            status = {"status_str": self.status, "completed": self.status == "success", "messages": self.messages}
            return 200, {"p1": {"outputs": {"picture": {"images": [PICTURE]}}, "status": status}}
        if path == "/view":
            if self.gone_until_freed and ("/free", {"free_memory": True}) not in self.posted:
                return 404, {}
            return 200, self.pictures[query["filename"]]
        return 200, {}


@pytest.fixture
def pretended() -> Iterator[Pretended]:
    state = Pretended()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            parts = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(parts.query))
            body = json.loads(self.rfile.read(length)) if length else None
            code, answer = state.answer(self.command, parts.path, query, body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _do

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture
def graph() -> dict[str, Any]:
    return with_picture(text_to_latent(steps=1))


def test_pictures_come_back_and_the_prompt_went_there(run, pretended: Pretended, graph: dict, tmp_path: Path):
    pretended.messages = [["execution_cached", {"nodes": ["model"], "prompt_id": "p1"}]]
    result = run(graph, engine=pretended.url)

    assert result.pictures == [tmp_path / "output" / "sub" / "test_00001_.png"]
    assert result.pictures[0].read_bytes() == pretended.pictures["test_00001_.png"]
    assert (result.cached, result.seeds) == (["model"], {"sampler": 7})
    (path, body), *_ = pretended.posted
    assert path == "/prompt" and body["prompt"] == graph and body["client_id"]


def test_the_editors_workflow_goes_along_for_the_picture(run, pretended: Pretended, graph: dict):
    workflow = {"nodes": [], "links": []}
    run({"prompt": graph, "extra_data": {"extra_pnginfo": {"workflow": workflow}}}, engine=pretended.url)

    assert pretended.posted[0][1]["extra_data"] == {"extra_pnginfo": {"workflow": workflow}}


def test_a_picture_that_is_there_already_is_not_overwritten(run, pretended: Pretended, graph: dict, tmp_path: Path):
    folder = tmp_path / "output" / "sub"
    folder.mkdir(parents=True)
    (folder / "test_00001_.png").write_bytes(b"mine")
    first = run(graph, engine=pretended.url)
    second = run(graph, engine=pretended.url)

    assert first.pictures == second.pictures == [folder / "test_00001__2.png"]
    assert (folder / "test_00001_.png").read_bytes() == b"mine"


@pytest.mark.parametrize("where", [{"subfolder": ".."}, {"filename": "../x.png"}, {"filename": "C:\\x.png"}])
def test_a_server_can_not_write_outside_the_output_folder(run, pretended: Pretended, graph: dict, monkeypatch, where):
    from nativedit.files.errors import UnsafePath

    entry = PICTURE | where
    pretended.pictures[entry["filename"]] = b"x"
    monkeypatch.setitem(globals(), "PICTURE", entry)
    with pytest.raises(UnsafePath):
        run(graph, engine=pretended.url)


def test_a_refused_graph_names_the_nodes(run, pretended: Pretended, graph: dict):
    from nativedit.engine.errors import WorkflowError

    error = {"type": "value_not_in_list", "message": "Value not in list", "details": "unet_name: 'x' not in [...]"}
    pretended.refusal = {
        "error": {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed validation"},
        "node_errors": {"model": {"errors": [error], "class_type": "UNETLoader", "dependent_outputs": ["picture"]}},
    }
    with pytest.raises(WorkflowError) as caught:
        run(graph, engine=pretended.url)
    assert caught.value.problems == ["node model UNETLoader: Value not in list: unet_name: 'x' not in [...]"]


def test_a_node_that_the_server_lacks(run, pretended: Pretended, graph: dict):
    from nativedit.engine.errors import WorkflowError

    message = "Node 'Odd' not found. The custom node may not be installed."
    pretended.refusal = {
        "error": {"type": "missing_node_type", "message": message, "details": "Node ID '#model'", "extra_info": {}},
        "node_errors": {},
    }
    with pytest.raises(WorkflowError, match="The custom node may not be installed"):
        run(graph, engine=pretended.url)


def test_a_failing_node_is_named(run, pretended: Pretended, graph: dict):
    from nativedit.engine.errors import NodeError

    data = {
        "prompt_id": "p1",
        "node_id": "sampler",
        "node_type": "KSampler",
        "exception_message": "out of memory\n",
        "exception_type": "RuntimeError",
        "traceback": [],
    }
    pretended.status, pretended.messages = "error", [["execution_start", {}], ["execution_error", data]]
    with pytest.raises(NodeError, match="node sampler KSampler: RuntimeError: out of memory"):
        run(graph, engine=pretended.url)


def test_an_interrupted_run_is_said(run, pretended: Pretended, graph: dict):
    pretended.status, pretended.messages = "error", [["execution_interrupted", {"node_id": "sampler"}]]
    with pytest.raises(OSError, match="ended as 'error': interrupted there"):
        run(graph, engine=pretended.url)


def test_pictures_that_the_server_remembers_but_lost_are_made_again(run, pretended: Pretended, graph: dict):
    pretended.gone_until_freed = True
    result = run(graph, engine=pretended.url)

    assert len(result.pictures) == 1
    assert [path for path, _ in pretended.posted] == ["/prompt", "/free", "/prompt"]


def test_ctrl_c_takes_the_run_off_the_server(run, pretended: Pretended, graph: dict, monkeypatch: pytest.MonkeyPatch):
    from nativedit.engine import remote

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(remote.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(graph, engine=pretended.url)
    assert ("/queue", {"delete": ["p1"]}) in pretended.posted
    assert ("/interrupt", {"prompt_id": "p1"}) in pretended.posted


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://127.0.0.1:9", "no answer .*is ComfyUI running there"),
        ("ftp://x", "not the address of a server"),
        ("file:///etc/passwd", "not the address of a server"),
    ],
)
def test_no_server(run, graph: dict, address: str, expected: str):
    with pytest.raises(OSError, match=expected):
        run(graph, engine=address)


def test_a_server_that_is_no_comfyui(run, pretended: Pretended, graph: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretended, "answer", lambda *_: (200, b"<html>hello</html>"))
    with pytest.raises(OSError, match="no JSON; is this a ComfyUI"):
        run(graph, engine=pretended.url)


@pytest.mark.comfyui
def test_on_a_real_comfyui(run, comfyui_path: Path, comfyui_interpreter: Path, tmp_path: Path):
    """Every step above against the real thing, one server for all of it."""
    from comfyui_server import Server, make_base
    from support import ROOT

    from nativedit.engine.errors import NodeError, WorkflowError

    base = make_base(tmp_path / "base")
    files.write_models(base / "models")
    with Server(comfyui_path, base, comfyui_interpreter) as server:
        saved = ROOT / "example_workflows" / "nativedit_demo.json"
        first = run(saved, engine=server.url, values={"6.steps": 2})
        with Image.open(first.pictures[0]) as picture:
            assert picture.size == (64, 64) and {"prompt", "workflow"} <= set(picture.text)
        again = run(saved, engine=server.url, values={"6.steps": 2})
        assert again.pictures == first.pictures and again.cached
        for picture in (base / "output").glob("*.png"):
            picture.unlink()
        assert run(saved, engine=server.url, values={"6.steps": 2}).pictures

        there, here = (run(of_everything(), **place).pictures for place in ({"engine": server.url}, {}))
        colours = [np.asarray(Image.open(picture), dtype=int) for picture in (*there, *here)]
        assert colours[0].shape == (48, 64, 3) and abs(colours[0] - colours[1]).max() <= 1
        muted = of_everything()
        muted["nodes"][0]["mode"] = 2
        with pytest.raises(
            WorkflowError, match="Required input is missing: model: node 1 UNETLoader, which gave it, is"
        ):
            run(muted, engine=server.url)

        graph = with_picture(text_to_latent(steps=1))
        graph["model"]["inputs"]["unet_name"] = "gone.safetensors"
        with pytest.raises(WorkflowError, match="node model UNETLoader: Value not in list"):
            run(graph, engine=server.url)
        with pytest.raises(NodeError, match=r"node latent NativeDiTEmptyLatent: .*60"):
            run(with_picture(text_to_latent(size=(60, 64))), engine=server.url)
