"""Runs a graph on a ComfyUI that runs elsewhere: queue it, poll its history, fetch the pictures.

It needs no package, and asks no other address than the one that the user gives.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from ..files.paths import contained
from .errors import NodeError, WorkflowError
from .graph import Graph
from .progress import Progress
from .ui_graph import WidgetInput

if TYPE_CHECKING:
    from . import RunResult

__all__ = ["Server", "ServerError", "run_on_server"]

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COLOR")
MANY_WIDGETS = "COMFY_DYNAMICCOMBO_V3"  # a choice that brings widgets of its own
WIDGET_MARKS = ("widgetType", "socketless")  # what declarations of widgets of other types have
UNSAVED = {"IMAGECOMPARE": ["", ""]}  # what the editor sends for a widget whose value it never saves
TIMEOUT = 30.0  # seconds for one answer, not for the run
USUAL_ADDRESS = "http://127.0.0.1:8188"


class ServerError(OSError):
    """The server can't be reached, or answers what ComfyUI would not."""


class Server:
    """address: http://host:port, with or without http://."""

    def __init__(self, address: str):
        if "://" not in address:
            address = f"http://{address}"
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{address}: not the address of a server; ComfyUI's own is {USUAL_ADDRESS}")
        self.address = address.rstrip("/")

    def get(self, path: str, **query: str) -> bytes:
        """Raises ServerError, and FileNotFoundError for 404."""
        return self._ask(path + ("?" + urllib.parse.urlencode(query) if query else ""), None)[1]

    def post(self, path: str, data: Any) -> tuple[int, bytes]:
        """The status and the answer. Refusals are given back too, because ComfyUI explains itself there."""
        # Refusals: 400 to 499.
        return self._ask(path, json.dumps(data).encode())

    def json(self, path: str, **query: str) -> Any:
        return _parsed(self.address + path, self.get(path, **query))

    def widgets_of(self, class_type: str) -> list[WidgetInput] | None:
        """The widgets of a node of this server, in the editor's order; None if it has no such node."""
        found = self.json("/object_info/" + urllib.parse.quote(class_type, safe="")).get(class_type)
        if found is None:
            return None
        return list(_widgets(found.get("input", {})))

    def _ask(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        request = Request(self.address + path, body, headers)
        try:
            with urlopen(request, timeout=TIMEOUT) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            if body is not None and 400 <= error.code < 500:
                return error.code, error.read()
            if error.code == 404:
                raise FileNotFoundError(f"{self.address}{path}: the server has no such thing") from None
            raise ServerError(f"{self.address}{path}: the server answered {error.code} {error.reason}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(f"{self.address}: no answer ({reason}); is ComfyUI running there?") from None


def _widgets(inputs: Any, prefix: str = "") -> Iterator[WidgetInput]:
    """Of a node, or of one choice of a widget that brings more."""
    for kind in ("required", "optional"):
        for name, declared in inputs.get(kind, {}).items():
            options = declared[1] if len(declared) > 1 and isinstance(declared[1], dict) else {}
            name, controlled = prefix + name, bool(options.get("control_after_generate"))
            if declared[0] == MANY_WIDGETS:
                choices = options.get("options", ())
                more = {one["key"]: tuple(_widgets(one.get("inputs", {}), name + ".")) for one in choices}
                yield WidgetInput(name, controlled, options.get("default", next(iter(more), None)), more)
            elif _is_widget(declared[0], options):
                default = None if isinstance(declared[0], list) else UNSAVED.get(declared[0])
                yield WidgetInput(name, controlled, options.get("default", default))


def _is_widget(kind: Any, options: Mapping[str, Any]) -> bool:
    if options.get("forceInput"):
        return False
    return isinstance(kind, list) or kind in WIDGET_TYPES or any(mark in options for mark in WIDGET_MARKS)


def _parsed(where: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ServerError(f"{where}: the answer is no JSON; is this a ComfyUI?") from None


def run_on_server(graph: Graph, address: str, output_dir: Path, *, progress: bool | None = None) -> RunResult:
    """Raises WorkflowError (the server refused the graph), NodeError (a node failed), ServerError."""
    server = Server(address)
    shown = Progress.for_terminal()
    if progress is not None:
        shown.lines = progress
    elif not shown.bars:
        shown = Progress()
    # The server remembers results whose files were deleted since. Made to forget them, it runs again; it may take the
    # next run up before it forgets, so there is one more.
    for _ in range(2):
        entry = _run_once(server, graph, shown)
        try:
            return _collect(server, graph, entry, output_dir)
        except FileNotFoundError:
            shown.note("pictures that the server remembers are gone; running again")
            server.post("/free", {"free_memory": True})
    return _collect(server, graph, _run_once(server, graph, shown), output_dir)


def _run_once(server: Server, graph: Graph, shown: Progress) -> dict[str, Any]:
    prompt_id = _queue(server, graph)
    shown.node(0, len(graph.nodes), f"queued at {server.address} as {prompt_id}")
    try:
        return _wait(server, prompt_id, shown)
    except KeyboardInterrupt:
        server.post("/queue", {"delete": [prompt_id]})
        server.post("/interrupt", {"prompt_id": prompt_id})
        raise


def _queue(server: Server, graph: Graph) -> str:
    extra = {"extra_pnginfo": {"workflow": graph.workflow}} if graph.workflow is not None else {}
    posted = {"prompt": graph.prompt(), "client_id": str(uuid.uuid4()), "extra_data": extra}
    status, data = server.post("/prompt", posted)
    answer = _parsed(server.address + "/prompt", data)
    problems = _node_problems(graph, answer.get("node_errors") or {})
    if status != 200 or "prompt_id" not in answer:
        error = answer.get("error") or {}
        if isinstance(error, str):
            error = {"message": error}
        if not problems or error.get("type") not in ("prompt_outputs_failed_validation", None):
            problems.insert(0, _joined(error.get("message", f"the server answered {status}"), error.get("details")))
        raise WorkflowError(graph.source, problems)
    if problems:  # the server would leave those outputs out without a word
        server.post("/queue", {"delete": [answer["prompt_id"]]})
        raise WorkflowError(graph.source, problems)
    return answer["prompt_id"]


def _node_problems(graph: Graph, node_errors: dict[str, Any]) -> list[str]:
    problems = []
    for node_id, found in node_errors.items():
        node = graph.nodes.get(node_id)
        name = node.name if node else f"node {node_id} {found.get('class_type', '')}"
        for error in found.get("errors", ()):
            told = (error.get("extra_info") or {}).get("input_name")
            problem = _joined(error.get("message", "refused"), error.get("details"))
            problems.append(f"{name}: {problem}{graph.why_lost(node_id, told)}")
    return problems


def _joined(message: str, details: Any) -> str:
    return f"{message}: {details}" if details else str(message)


def _wait(server: Server, prompt_id: str, shown: Progress) -> dict[str, Any]:
    """The history entry of a finished run."""
    pause = 0.1
    with shown.bar(0, "waiting for ComfyUI", unit="s") as bar:
        started = time.monotonic()
        while True:
            entry = server.json(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None and entry.get("status", {}).get("completed") is not None:
                return entry
            time.sleep(pause)
            pause = min(1.0, pause * 1.3)
            bar.to(int(time.monotonic() - started))


def _collect(server: Server, graph: Graph, entry: dict[str, Any], output_dir: Path) -> RunResult:
    from . import RunResult

    status = entry.get("status", {})
    messages = {name: data for name, data in status.get("messages", ())}
    if failed := messages.get("execution_error"):
        node_id = str(failed.get("node_id"))
        title = graph.nodes[node_id].title if node_id in graph.nodes else ""
        problem = f"{failed.get('exception_type', 'error')}: {str(failed.get('exception_message', '')).strip()}"
        raise NodeError(node_id, str(failed.get("node_type")), title, problem)
    if status.get("status_str") != "success":
        raise ServerError(f"{server.address}: the run ended as {status.get('status_str')!r}: interrupted there?")
    result = RunResult(cached=list(messages.get("execution_cached", {}).get("nodes", ())))
    for node_id, ui in entry.get("outputs", {}).items():
        result.ui[node_id] = ui
        for picture in ui.get("images", ()):
            if picture.get("type") == "output":
                result.pictures.append(_download(server, picture, output_dir))
    return result


def _download(server: Server, picture: dict[str, str], output_dir: Path) -> Path:
    """The picture under its own name, or the next free one."""
    query = {key: str(picture.get(key, "")) for key in ("filename", "subfolder", "type")}
    data = server.get("/view", **query)
    target = contained(output_dir, "/".join(part for part in (query["subfolder"], query["filename"]) if part))
    target.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    path = target
    while True:
        try:
            with open(path, "xb") as file:
                file.write(data)
            return path
        except FileExistsError:
            if path.read_bytes() == data:
                return path
            number += 1
            path = target.with_name(f"{target.stem}_{number}{target.suffix}")
