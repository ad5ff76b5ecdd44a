"""A real ComfyUI with the pack installed as a user has it, in folders of its own, spoken to over HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comfyui_support import ROOT, comfyui_python, is_comfyui

PACK_FOLDER = "ComfyUI-NativeDiT"
MODEL_FOLDERS = ("checkpoints", "clip", "diffusion_models", "embeddings", "loras", "text_encoders", "unet", "vae")
# For the start and for a graph; a busy machine may need more.
WAIT_SECONDS = int(os.environ.get("NATIVEDIT_COMFYUI_SECONDS", "300"))
ANSWER_SECONDS = WAIT_SECONDS / 5


def comfyuis(default: Path | None) -> list[Path]:
    """The ComfyUI that was found, and those of $NATIVEDIT_COMFYUI_ALL (paths separated as in $PATH)."""
    named = [
        Path(entry).expanduser() for entry in os.environ.get("NATIVEDIT_COMFYUI_ALL", "").split(os.pathsep) if entry
    ]
    for folder in named:
        if not is_comfyui(folder):
            raise ValueError(f"NATIVEDIT_COMFYUI_ALL names {folder}, which holds no ComfyUI")
    return list(dict.fromkeys(folder.resolve() for folder in ([default] if default else []) + named))


def version_of(comfyui: Path) -> str:
    text = (comfyui / "comfyui_version.py").read_text(encoding="utf-8")
    return re.search(r'__version__ = "([^"]+)"', text)[1]


def at_least(comfyui: Path, version: str) -> bool:
    return tuple(map(int, version_of(comfyui).split("."))) >= tuple(map(int, version.split(".")))


def python_for(comfyui: Path, default: Path) -> Path:
    """A checkout without an environment of its own runs on the default one's."""
    own = comfyui_python(comfyui)
    return comfyui_python(default) if str(own) == sys.executable and comfyui != default else own


def install_pack(custom_nodes: Path, name: str = PACK_FOLDER) -> Path:
    """The pack as `git clone` leaves it, without what only developers run."""
    target = custom_nodes / name
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".git", ".venv", "tests", "__pycache__"))
        return target
    for file in filter(None, listed.stdout.decode().split("\0")):
        if not file.startswith(("tests/", "benchmarks/", "scripts/")) and (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, target / file)
    return target


def make_base(folder: Path) -> Path:
    """ComfyUI's folders for models, input, output and custom nodes, the pack among them."""
    for name in MODEL_FOLDERS:
        (folder / "models" / name).mkdir(parents=True)
    for name in ("custom_nodes", "input", "output", "temp", "user"):
        (folder / name).mkdir()
    install_pack(folder / "custom_nodes")
    return folder


def environment() -> dict[str, str]:
    """One thread: sums of several differ in the last digits, and the machine runs the tests too."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


class GraphError(Exception):
    """ComfyUI refused a graph, or a node failed. ``node`` and ``message`` are what its interface would show."""

    def __init__(self, node: str | None, message: str):
        self.node, self.message = node, message
        super().__init__(f"node {node}: {message}")


@dataclass
class Server:
    comfyui: Path
    base: Path
    python: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen | None = field(default=None, repr=False)
    url: str = ""
    start_log: str = field(default="", repr=False)
    given: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def log_file(self) -> Path:
        return self.base / "server.log"

    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def models(self, folder: str) -> Path:
        return self.base / "models" / folder

    def __enter__(self) -> Server:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [str(self.python), "main.py", "--cpu", "--port", str(port), "--base-directory", str(self.base)]
        command += ["--disable-auto-launch", "--disable-api-nodes", "--database-url", "sqlite:///:memory:"]
        with open(self.log_file, "wb") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments], cwd=self.comfyui, stdout=log, stderr=subprocess.STDOUT, env=environment()
            )
        self._wait_until_it_answers()
        self.start_log = self.log()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI stopped with {self.process.returncode}:\n{self.log()[-4000:]}")
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.25)
        self.__exit__()
        raise RuntimeError(f"ComfyUI did not answer within {WAIT_SECONDS} s:\n{self.log()[-4000:]}")

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_SECONDS) as answer:
            return answer.read()

    def get_json(self, path: str) -> Any:
        return json.loads(self.get(path))

    def run(self, graph: dict[str, Any]) -> dict[str, Any]:
        """Outputs by node id of a graph in API format. Raises GraphError."""
        body = json.dumps({"prompt": graph}).encode()
        request = urllib.request.Request(self.url + "/prompt", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                prompt_id = json.loads(answer.read())["prompt_id"]
        except urllib.error.HTTPError as error:
            raise _refused(json.loads(error.read())) from None
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            entry = self.get_json(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None and entry.get("status", {}).get("completed") is not None:
                return self._with_cached(graph, _outputs(entry))
            if self.process.poll() is not None:
                raise RuntimeError(f"ComfyUI died during a graph:\n{self.log()[-4000:]}")
            time.sleep(0.05)
        raise TimeoutError(f"the graph did not finish within {WAIT_SECONDS} s:\n{self.log()[-4000:]}")

    def _with_cached(self, graph: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
        """ComfyUI 0.8 tells nothing of nodes whose result it has; what they gave before is still so."""
        given = {node: json.dumps(_upstream(graph, node), sort_keys=True) for node in graph}
        self.given |= {given[node]: output for node, output in outputs.items() if node in given}
        if at_least(self.comfyui, "0.29"):
            return outputs
        return {node: self.given[text] for node, text in given.items() if text in self.given} | outputs

    def file_of(self, output: dict[str, Any]) -> Path:
        """Where a picture or latent of a node's outputs lies."""
        return self.base / output["type"] / output["subfolder"] / output["filename"]

    def log_during(self, action) -> tuple[Any, str]:
        """What ``action()`` returns, and what the log got meanwhile."""
        before = len(self.log())
        result = action()
        return result, self.log()[before:]


def _upstream(graph: dict[str, Any], node: str) -> list[Any]:
    """A node with all that it depends on, whatever their ids are."""
    inputs = {
        name: [_upstream(graph, value[0]), value[1]] if isinstance(value, list) and value[0] in graph else value
        for name, value in graph[node]["inputs"].items()
    }
    return [graph[node]["class_type"], inputs]


def _refused(answer: dict[str, Any]) -> GraphError:
    for node, errors in (answer.get("node_errors") or {}).items():
        problem = errors["errors"][0]
        return GraphError(node, f"{problem['message']}: {problem['details']}")
    return GraphError(None, answer["error"]["message"])


def _outputs(entry: dict[str, Any]) -> dict[str, Any]:
    if entry["status"]["status_str"] == "success":
        return entry["outputs"]
    for kind, data in entry["status"]["messages"]:
        if kind == "execution_error":
            raise GraphError(data["node_id"], data["exception_message"].strip())
    raise GraphError(None, json.dumps(entry["status"]))
