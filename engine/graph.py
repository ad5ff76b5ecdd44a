"""A workflow as data: API-format JSON, read from a path, a text or a dict."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import WorkflowError, node_name

__all__ = ["Graph", "Link", "Node", "read_workflow"]

# What people and programs put beside the nodes to explain them.
COMMENT_MARKS = ("_", "//", "#")


@dataclass(frozen=True)
class Link:
    """An input that takes output number ``output`` of node ``node``."""

    node: str
    output: int


@dataclass
class Node:
    id: str
    class_type: str
    inputs: dict[str, Any]  # values, or Link
    title: str = ""

    @property
    def name(self) -> str:
        return node_name(self.id, self.class_type, self.title)

    @property
    def links(self) -> dict[str, Link]:
        return {key: value for key, value in self.inputs.items() if isinstance(value, Link)}


@dataclass
class Graph:
    """A workflow as nodes and links."""

    # What messages call it.
    source: str
    nodes: dict[str, Node] = field(default_factory=dict)
    # The UI-format JSON that travelled with it, if any.
    workflow: dict[str, Any] | None = None
    # Where that JSON keeps a seed: (node id, input) -> (container, key).
    seed_places: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    # Links of that JSON which lead nowhere: (node id, input) -> why.
    lost: dict[tuple[str, str], str] = field(default_factory=dict)

    def why_lost(self, node_id: str, key: str) -> str:
        """What to add to a message on an input that is not set; empty when nothing was ever connected to it."""
        reason = self.lost.get((node_id, key))
        return f": {reason}" if reason else ""

    def prompt(self) -> dict[str, Any]:
        """API-format JSON of the graph, as ComfyUI writes it into pictures."""
        written = {}
        for node in self.nodes.values():
            inputs = {key: _written(value) for key, value in node.inputs.items()}
            written[node.id] = {"inputs": inputs, "class_type": node.class_type}
            if node.title:
                written[node.id]["_meta"] = {"title": node.title}
        return written


def read_workflow(workflow: str | os.PathLike | Mapping[str, Any], widgets: Any) -> Graph:
    """The graph in a workflow, which is a path, a text or the object that the text stands for.

    It may have the format of the server, bare or as posted, or the one in which ComfyUI's editor saves; or it is a
    picture with either inside. Raises WorkflowError and FileNotFoundError.
    """
    # For `widgets` see ui_graph.
    source, data = _load(workflow)
    if not isinstance(data, Mapping):
        raise WorkflowError(source, [f"a JSON object was expected, found {type(data).__name__}"])
    if looks_like_ui(data):
        from .ui_graph import graph_from_ui

        return graph_from_ui(source, data, widgets)
    graph = Graph(source)
    if looks_like_prompt(data.get("prompt")):
        graph.workflow = _extra_workflow(data)
        data = data["prompt"]
    problems: list[str] = []
    for key, value in data.items():
        node = _node(str(key), value, problems)
        if node is not None:
            graph.nodes[node.id] = node
    if not graph.nodes and not problems:
        problems.append(
            f"is no workflow: neither nodes in API format (class_type, inputs) nor a saved one (nodes, links); "
            f"its first keys: {', '.join(map(str, list(data)[:5])) or 'none'}"
        )
    if problems:
        raise WorkflowError(source, problems)
    return graph


def _load(workflow: str | os.PathLike | Mapping[str, Any]) -> tuple[str, Any]:
    if isinstance(workflow, Mapping):
        return "workflow", workflow
    if isinstance(workflow, str) and workflow.lstrip()[:1] in ("{", "["):
        return "workflow", _parse("workflow", workflow)
    path = Path(workflow)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such workflow file")
    if path.suffix.lower() == ".png":
        return str(path), _from_picture(path)
    return str(path), _parse(str(path), path.read_bytes())


def _parse(source: str, text: str | bytes) -> Any:
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise WorkflowError(source, ["is no text file; a workflow exported as JSON was expected"]) from None
    except json.JSONDecodeError as error:
        raise WorkflowError(source, [f"is no JSON: {error.msg} in line {error.lineno}, column {error.colno}"]) from None


def _from_picture(path: Path) -> Any:
    """The prompt inside a PNG that ComfyUI or this engine saved."""
    from PIL import Image

    with Image.open(path) as picture:
        text = getattr(picture, "text", {})
    if "prompt" not in text:
        raise WorkflowError(str(path), ["this picture carries no workflow (no text chunk called prompt)"])
    posted = {"prompt": _parse(str(path), text["prompt"])}
    if "workflow" in text:
        posted["extra_data"] = {"extra_pnginfo": {"workflow": _parse(str(path), text["workflow"])}}
    return posted


def looks_like_prompt(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, Mapping) and "class_type" in v for v in value.values())


def looks_like_ui(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("nodes"), list) and ("links" in value or "last_node_id" in value)


def _extra_workflow(data: Mapping[str, Any]) -> dict[str, Any] | None:
    extra = data.get("extra_data")
    info = extra.get("extra_pnginfo") if isinstance(extra, Mapping) else None
    found = info.get("workflow") if isinstance(info, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else None


def _node(key: str, value: Any, problems: list[str]) -> Node | None:
    if not isinstance(value, Mapping) or "class_type" not in value:
        if not key.startswith(COMMENT_MARKS) and isinstance(value, Mapping):
            problems.append(f"node {key} has no class_type; is this a workflow in API format?")
        return None
    class_type, inputs = value["class_type"], value.get("inputs", {})
    if not isinstance(class_type, str) or not isinstance(inputs, Mapping):
        problems.append(f"node {key}: class_type must be a text and inputs an object")
        return None
    meta = value.get("_meta")
    title = meta.get("title") if isinstance(meta, Mapping) else None
    node = Node(key, class_type, {}, title if isinstance(title, str) else "")
    for name, given in inputs.items():
        if not str(name).startswith(COMMENT_MARKS):
            node.inputs[str(name)] = _link(given) or _value(given)
    return node


def _link(given: Any) -> Link | None:
    """ComfyUI writes a link as a list of a node's id and an output's number; a list that is a value comes wrapped."""
    # {"__value__": [...]}
    if isinstance(given, list) and len(given) == 2 and isinstance(given[0], (str, int)):
        output = given[1]
        if isinstance(output, int) and not isinstance(output, bool) and not isinstance(given[0], bool):
            return Link(str(given[0]), output)
    return None


def _written(value: Any) -> Any:
    if isinstance(value, Link):
        return [value.node, value.output]
    return {"__value__": value} if isinstance(value, list) else value


def _value(given: Any) -> Any:
    return given["__value__"] if isinstance(given, Mapping) and set(given) == {"__value__"} else given
