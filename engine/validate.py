"""The whole graph is checked before anything is loaded: every problem, one sentence each."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from ..files.errors import UnsafePath
from ..files.paths import safe_parts
from ..supported_models import AUTO
from .auto_files import auto_problem
from .errors import WorkflowError
from .graph import Graph, Link, Node
from .model_folders import FileList, ModelFolders
from .pictures import expand_prefix

__all__ = ["execution_order", "validate"]

# The editor leaves these among an exported node's inputs; they mean nothing to the node.
EDITOR_INPUTS = frozenset({"upload", "choose file to upload", "control_after_generate"})
# Nodes that only the editor has: an export leaves them out, a hand-written file may not.
EDITOR_NODES = frozenset({"Note", "MarkdownNote"})


def validate(graph: Graph, classes: Mapping[str, type], folders: ModelFolders) -> tuple[list[str], dict[str, Any]]:
    """(ids in the order to run, schema of each class used). File names in the graph are replaced by the listed ones.

    Raises WorkflowError with all problems.
    """
    for node_id in [node.id for node in graph.nodes.values() if node.class_type in EDITOR_NODES]:
        del graph.nodes[node_id]
    problems: list[str] = []
    schemas: dict[str, Any] = {}
    for node in graph.nodes.values():
        if node.class_type not in classes:
            problems.append(_unknown_class(node, classes))
        elif node.class_type not in schemas:
            schemas[node.class_type] = classes[node.class_type].define_schema()
    outputs = [n.id for n in graph.nodes.values() if n.class_type in schemas and schemas[n.class_type].is_output_node]
    if not outputs and not problems:
        problems.append("no node saves or shows anything; add a SaveImage node")
    order = execution_order(graph, outputs, problems)
    for node_id in order:
        node = graph.nodes[node_id]
        if node.class_type in schemas:
            found = _check_inputs(node, graph, schemas, folders)
            problems += found or _own_check(node, classes[node.class_type]) or _check_prefix(node, graph)
    if problems:
        raise WorkflowError(graph.source, list(dict.fromkeys(problems)))
    return order, schemas


def _own_check(node: Node, cls: type) -> list[str]:
    """What the node itself has to say about its values, where it has a say and all it asks for are values."""
    check = getattr(cls, "validate_inputs", None)
    if check is None or node.links:
        return []
    problem = check(**node.inputs)
    return [] if problem is True else [f"{node.name}: {problem}"]


def _check_prefix(node: Node, graph: Graph) -> list[str]:
    """A name that no file can have is said now, and not when everything is computed."""
    prefix = node.inputs.get("filename_prefix")
    if not isinstance(prefix, str):
        return []
    try:
        safe_parts(expand_prefix(prefix, width=0, height=0, prompt=graph.prompt()), "the output folder")
    except UnsafePath as error:
        return [f"{node.name}: input filename_prefix: {error}"]
    return []


def _unknown_class(node: Node, classes: Mapping[str, type]) -> str:
    folded = {name.lower(): name for name in classes}
    close = [folded[name] for name in difflib.get_close_matches(node.class_type.lower(), folded, n=3, cutoff=0.6)]
    hint = f"; the closest: {', '.join(close)}" if close else ""
    return (
        f"{node.name}: this node is not among those that run without ComfyUI{hint}. If ComfyUI or another pack has it, "
        "run the workflow there with --server URL"
    )


def execution_order(graph: Graph, outputs: list[str], problems: list[str]) -> list[str]:
    """Every node that the outputs need, each after those it takes from. Cycles and lost links become problems."""
    order: list[str] = []
    state: dict[str, int] = {}  # 1 = on the path being walked, 2 = done
    for start in outputs:
        path = [(start, iter(graph.nodes[start].links.values()))] if start not in state else []
        state.setdefault(start, 1)
        while path:
            node_id, links = path[-1]
            link = next(links, None)
            if link is None:
                path.pop()
                state[node_id] = 2
                order.append(node_id)
            elif link.node not in graph.nodes:
                problems.append(f"{graph.nodes[node_id].name}: takes from node {link.node}, which does not exist")
            elif state.get(link.node) == 1:
                ids = [step for step, _ in path]
                circle = [*ids[ids.index(link.node) :], link.node]
                problems.append("the graph runs in a circle: " + " <- ".join(graph.nodes[i].name for i in circle))
            elif link.node not in state:
                state[link.node] = 1
                path.append((link.node, iter(graph.nodes[link.node].links.values())))
    return order


def _check_inputs(node: Node, graph: Graph, schemas: Mapping[str, Any], folders: ModelFolders) -> list[str]:
    problems = []
    wanted = {item.id: item for item in schemas[node.class_type].inputs}
    for key in [key for key in node.inputs if key not in wanted]:
        if key in EDITOR_INPUTS:
            del node.inputs[key]
            continue
        close = difflib.get_close_matches(key, wanted, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(wanted) or 'none'}"
        problems.append(f"{node.name}: has no input {key!r}{hint}")
    for key, item in wanted.items():
        if key not in node.inputs:
            if getattr(item, "default", None) is not None:
                node.inputs[key] = item.default
            elif not item.optional:
                why = graph.why_lost(node.id, key)
                problems.append(f"{node.name}: input {key} ({item.io_type}) is not set{why}")
            continue
        given = node.inputs[key]
        if given == AUTO and isinstance(getattr(item, "options", None), FileList):
            chosen = node.inputs.get("architecture", AUTO)
            problem, node.inputs[key] = auto_problem(folders, item.options.folder, chosen)
        elif isinstance(given, Link):
            problem = _check_link(given, item, graph, schemas)
        else:
            problem, node.inputs[key] = _check_value(given, item, folders)
        if problem:
            problems.append(f"{node.name}: input {key} {problem}")
    return problems


def _check_link(link: Link, item: Any, graph: Graph, schemas: Mapping[str, Any]) -> str | None:
    source = graph.nodes.get(link.node)
    if source is None or source.class_type not in schemas:
        return None  # said already
    outputs = schemas[source.class_type].outputs
    if not 0 <= link.output < len(outputs):
        return f"takes output {link.output} of {source.name}, which has {len(outputs)}"
    given = outputs[link.output].io_type
    if "*" in (given, item.io_type) or set(given.split(",")) & set(item.io_type.split(",")):
        return None
    return f"wants {item.io_type}, but output {link.output} of {source.name} is {given}"


def _check_value(given: Any, item: Any, folders: ModelFolders) -> tuple[str | None, Any]:
    """(problem or None, the value the node gets)."""
    kind = item.io_type
    if kind == "*":
        return None, given
    if kind in ("INT", "FLOAT"):
        return _check_number(given, item)
    if kind == "STRING":
        return (None, given) if isinstance(given, str) else (f"wants a text, found {given!r}", given)
    if kind == "BOOLEAN":
        return (None, given) if isinstance(given, bool) else (f"wants true or false, found {given!r}", given)
    if kind == "COMBO":
        return _check_choice(given, item.options, folders)
    return f"wants a link to a {kind}, found {given!r}", given


def _check_number(given: Any, item: Any) -> tuple[str | None, Any]:
    whole = item.io_type == "INT"
    word = "a whole number" if whole else "a number"
    try:
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ValueError
        value = float(given) if not whole else int(given) if isinstance(given, (int, str)) else int(float(given))
        if not math.isfinite(value) or (whole and isinstance(given, float) and value != given):
            raise ValueError
    except (ValueError, OverflowError):
        return f"wants {word}, found {given!r}", given
    if item.min is not None and value < item.min:
        return f"is {given!r}; the smallest is {item.min}", given
    if item.max is not None and value > item.max:
        return f"is {given!r}; the largest is {item.max}", given
    return None, value


def _check_choice(given: Any, options: list[Any], folders: ModelFolders) -> tuple[str | None, Any]:
    if given in options:
        return None, given
    if isinstance(options, FileList):
        try:
            return None, folders.find(options.folder, str(given))
        except ValueError as error:
            return f"names a file that is not there: {error}", given
    close = difflib.get_close_matches(str(given), [str(o) for o in options], n=3, cutoff=0.5)
    hint = f"the closest: {', '.join(close)}" if close else f"choices: {', '.join(map(str, options))}"
    return f"can't be {given!r}; {hint}", given
