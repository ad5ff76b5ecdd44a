"""A workflow as ComfyUI's editor saves it, turned into a graph: what the editor does when it exports one.

Links become direct: through reroutes, primitives, bypassed nodes and subgraphs; muted nodes are left out. The values
of widgets are saved by position, so the node's declaration names them.
"""
# In the editor: File > Export (API). Nodes of subgraphs get ids like "12:3".

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import WorkflowError, node_name
from .graph import Graph, Link, Node

__all__ = ["WidgetInput", "graph_from_ui"]

MUTED, BYPASSED = 2, 4
EDITOR_ONLY = frozenset({"Note", "MarkdownNote", "PrimitiveNode", "Reroute"})
# A subgraph's links name its own inputs and outputs as nodes of these ids.
GRAPH_INPUT, GRAPH_OUTPUT = "-10", "-20"
AFTER_GENERATE = ("fixed", "increment", "decrement", "randomize")
SEEDS = ("seed", "noise_seed")
# What comes of a number, a name or a list that is missing or is something else. RecursionError: links in a circle.
_DAMAGED = (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class WidgetInput:
    """One input that the editor shows as a widget. controlled: a "control after generate" value follows it; default:
    what it has in a workflow that was saved before the node got it; more: value -> widgets that this choice brings."""

    name: str
    controlled: bool = False
    default: Any = None
    more: Mapping[str, tuple[WidgetInput, ...]] = field(default_factory=dict)


# class -> its widgets in order, None for an unknown class
Widgets = Callable[[str], "list[WidgetInput] | None"]


@dataclass
class _Scope:
    """The editor's nodes and links of one level: the workflow itself, or one instance of a subgraph."""

    prefix: str
    nodes: dict[str, dict[str, Any]]
    links: dict[str, tuple[str, int, str, int]]  # link id -> from node, from slot, to node, to slot
    outer: _Scope | None = None
    instance: dict[str, Any] | None = None
    definition: Mapping[str, Any] | None = None
    inner: dict[str, _Scope] = field(default_factory=dict)

    def into(self, node_id: str, slot: int) -> tuple[str, int] | None:
        """(from node, from slot) of what arrives at an input slot. The input's own word counts: slots move when a node
        changes."""
        inputs = self.nodes.get(node_id, {}).get("inputs") or ()
        named = self.links.get(str(inputs[slot].get("link"))) if slot < len(inputs) else None
        if named is not None:
            return named[:2]
        for start, start_slot, end, end_slot in self.links.values():
            if (end, end_slot) == (node_id, slot):
                return start, start_slot
        return None


@dataclass
class _Value:
    """A literal that stands where a link was: a primitive's, or a promoted widget's. place: (container, key) where the
    editor keeps it; drawn: a seed is drawn anew; None: if the widget itself says so."""

    value: Any
    place: tuple[Any, Any]
    drawn: bool | None = False


@dataclass
class _Lost:
    """A link that leads nowhere, with the reason."""

    reason: str


def graph_from_ui(source: str, data: Mapping[str, Any], widgets: Widgets) -> Graph:
    """Raises WorkflowError that names every node that can't be converted, or says that the file is damaged."""
    try:
        return _graph(source, data, widgets)
    except WorkflowError:
        raise
    except _DAMAGED as error:
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        problem = (
            f"is damaged: its nodes and links are not as ComfyUI's editor saves them ({told}); save it again there"
        )
        raise WorkflowError(source, [problem]) from error


def _graph(source: str, data: Mapping[str, Any], widgets: Widgets) -> Graph:
    data = copy.deepcopy(dict(data))
    definitions = {d["id"]: d for d in (data.get("definitions") or {}).get("subgraphs", ())}
    graph = Graph(source, workflow=data)
    problems: list[str] = []
    root = _scope(data, definitions, problems)
    for scope, node in _active(root):
        converted = _convert(scope, node, widgets, graph)
        graph.nodes[converted.id] = converted
    if not graph.nodes and not problems:
        problems.append("holds no node that runs")
    if problems:
        raise WorkflowError(source, problems)
    return graph


def _scope(level, definitions, problems, prefix="", outer=None, instance=None, path=()) -> _Scope:
    scope = _Scope(prefix, {}, {}, outer, instance, level if outer else None)
    for node in level.get("nodes", ()):
        scope.nodes[str(node["id"])] = node
    for link in level.get("links", ()):
        if isinstance(link, Mapping):
            keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot")
            link = [link.get(key) for key in keys]
        if link:
            number, start, start_slot, end, end_slot = link[:5]
            scope.links[str(number)] = (str(start), int(start_slot), str(end), int(end_slot))
    for node_id, node in scope.nodes.items():
        kind = str(node.get("type"))
        if kind in definitions:
            if kind in path:
                problems.append(f"node {prefix}{node_id}: a subgraph that contains itself")
                continue
            scope.inner[node_id] = _scope(
                definitions[kind], definitions, problems, f"{prefix}{node_id}:", scope, node, (*path, kind)
            )
        elif _looks_like_uuid(kind):
            name = node_name(prefix + node_id, kind, node.get("title", ""))
            problems.append(f"{name}: a subgraph that the file does not define; save the workflow again in ComfyUI")
    return scope


def _looks_like_uuid(kind: str) -> bool:
    return len(kind) == 36 and [len(part) for part in kind.split("-")] == [8, 4, 4, 4, 12]


def _active(scope: _Scope) -> Iterator[tuple[_Scope, dict[str, Any]]]:
    """Every node that runs, those of subgraphs in place of the subgraph."""
    for node_id, node in scope.nodes.items():
        if node.get("mode", 0) in (MUTED, BYPASSED):
            continue
        if node_id in scope.inner:
            yield from _active(scope.inner[node_id])
        elif node.get("type") not in EDITOR_ONLY:
            yield scope, node


def _convert(scope: _Scope, node: dict[str, Any], widgets: Widgets, graph: Graph) -> Node:
    class_type = str(node["type"])
    converted = Node(scope.prefix + str(node["id"]), class_type, {}, str(node.get("title") or ""))
    declared = widgets(class_type)
    for name, value, place in _widget_values(node, declared):
        converted.inputs[name] = value
        if name in SEEDS and place is not None:
            graph.seed_places[converted.id, name] = place
    for slot, given in enumerate(node.get("inputs") or ()):
        found = _arriving(scope, str(node["id"]), slot)
        if found is None and not given.get("widget"):
            found = _shared(scope, str(node["id"]), slot, widgets)
        if isinstance(found, _Value):
            own = converted.inputs.get(given["name"]) == -1
            drawn = given["name"] in SEEDS and (own if found.drawn is None else found.drawn)
            converted.inputs[given["name"]] = -1 if drawn else found.value
            if given["name"] in SEEDS:
                graph.seed_places[converted.id, given["name"]] = found.place
        elif isinstance(found, _Lost):
            graph.lost[converted.id, given["name"]] = found.reason
        elif found is not None:
            converted.inputs[given["name"]] = found
    return converted


def _widget_values(node: Mapping[str, Any], declared: list[WidgetInput] | None):
    """(name, value, (container, key) where the editor keeps it)"""
    values = node.get("widgets_values")
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield name, value, (values, name)
        return
    if values and not isinstance(values, list):
        raise TypeError("widgets_values is neither a list nor an object")
    values, position = values or [], 0
    waiting = list(declared or ())
    while waiting:
        widget = waiting.pop(0)
        if position >= len(values):
            if widget.default is not None:
                yield widget.name, copy.deepcopy(widget.default), None
                waiting[:0] = widget.more.get(widget.default, ()) if widget.more else ()
            continue
        value, place = values[position], (values, position)
        if isinstance(value, str):
            waiting[:0] = widget.more.get(value, ())
        position += 1
        follows = values[position] if position < len(values) else None
        if (widget.controlled or widget.name in SEEDS) and follows in AFTER_GENERATE:
            position += 1
            value = -1 if follows == "randomize" and widget.name in SEEDS else value
        yield widget.name, value, place


def _arriving(scope: _Scope, node_id: str, slot: int) -> Link | _Value | _Lost | None:
    """What an input slot gets, followed back to a node that runs. None: nothing is connected."""
    start = scope.into(node_id, slot)
    return None if start is None else _leaving(scope, *start)


def _leaving(scope: _Scope, node_id: str, slot: int) -> Link | _Value | _Lost | None:
    if node_id == GRAPH_INPUT:
        assert scope.outer is not None and scope.instance is not None
        own = _instance_slot(scope, slot)
        found = None if own is None else _arriving(scope.outer, str(scope.instance["id"]), own)
        return _promoted(scope, slot) or found if found is None or isinstance(found, _Lost) else found
    node = scope.nodes.get(node_id)
    if node is None:
        return _Lost(f"node {scope.prefix}{node_id}, which gave it, is not in the file")
    if node.get("mode", 0) == MUTED:
        return _Lost(f"{_called(scope, node_id)}, which gave it, is muted")
    if node.get("mode", 0) == BYPASSED:
        passed = _passed_through(node, slot)
        found = None if passed is None else _arriving(scope, node_id, passed)
        return found or _Lost(f"{_called(scope, node_id)}, which gave it, is bypassed and gets none to hand on")
    if node_id in scope.inner:
        return _arriving(scope.inner[node_id], GRAPH_OUTPUT, slot)
    if node["type"] == "Reroute":
        return _arriving(scope, node_id, 0)
    if node["type"] == "PrimitiveNode":
        values = _listed(node) or [None]
        return _Value(values[0], (values, 0), drawn=len(values) > 1 and values[1] == "randomize")
    return Link(scope.prefix + node_id, slot)


def _listed(node: Mapping[str, Any]) -> list[Any]:
    values = node.get("widgets_values")
    return values if isinstance(values, list) else []


def _called(scope: _Scope, node_id: str) -> str:
    """A node's name in messages; a subgraph's is the one that people gave it."""
    node, inside = scope.nodes[node_id], scope.inner.get(node_id)
    kind = str(node.get("type")) if inside is None else str((inside.definition or {}).get("name") or "subgraph")
    return node_name(scope.prefix + node_id, kind, node.get("title") or "")


def _instance_slot(scope: _Scope, slot: int) -> int | None:
    """Where a subgraph's instance keeps one of its inputs: it names them, and may leave out those that are widgets."""
    declared = (scope.definition or {}).get("inputs") or ()
    names = [given.get("name") for given in scope.instance.get("inputs") or ()]
    name = declared[slot].get("name") if slot < len(declared) else None
    return names.index(name) if name in names else slot if len(names) == len(declared) else None


def _promoted(scope: _Scope, slot: int) -> _Value | None:
    """The value that a subgraph's instance holds for one of its inputs, if it holds any: the editor shows and runs this
    one, whatever the widget inside was left at."""
    values = _listed(scope.instance)
    inside = [i for i in range(len((scope.definition or {}).get("inputs") or ())) if _widget_behind(scope, i)]
    if slot in inside and len(values) == len(inside):
        place = inside.index(slot)
        return _Value(values[place], (values, place), drawn=None)
    slot = _instance_slot(scope, slot)
    shown = [i for i, given in enumerate(scope.instance.get("inputs") or ()) if given.get("widget")]
    if slot in shown and len(values) == len(shown):
        place = shown.index(slot)
        return _Value(values[place], (values, place), drawn=None)
    return None


def _widget_behind(scope: _Scope, slot: int) -> tuple[str, str] | None:
    """(node inside, its widget) that an input of a subgraph is for."""
    for start, start_slot, end, end_slot in scope.links.values():
        inputs = scope.nodes.get(end, {}).get("inputs") or ()
        widget = inputs[end_slot].get("widget") if end_slot < len(inputs) else None
        if (start, start_slot) == (GRAPH_INPUT, slot) and widget:
            return end, str(widget.get("name"))
    return None


def _shared(scope: _Scope, node_id: str, slot: int, widgets: Widgets) -> _Value | None:
    """What a subgraph's input gives where nothing is connected to it: the value of the widget inside that it is for."""
    start = scope.into(node_id, slot)
    behind = _widget_behind(scope, start[1]) if start is not None and start[0] == GRAPH_INPUT else None
    if behind is None or behind[0] in scope.inner:
        return None
    node = scope.nodes[behind[0]]
    for name, value, place in _widget_values(node, widgets(str(node["type"]))):
        if name == behind[1]:
            return _Value(value, place or ([value], 0))
    return None


def _passed_through(node: Mapping[str, Any], slot: int) -> int | None:
    """The input slot that a bypassed node hands on at an output: of the same type, the one of the same number first."""
    outputs, inputs = node.get("outputs") or [], node.get("inputs") or []
    if slot >= len(outputs):
        return None
    wanted = outputs[slot].get("type")
    if wanted == "*":
        return slot if slot < len(inputs) else 0 if inputs else None
    order = [slot, *range(len(inputs))]
    return next((i for i in order if i < len(inputs) and inputs[i].get("type") == wanted), None)
