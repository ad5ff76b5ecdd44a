"""Values that are set from outside before a run: single inputs, and seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from . import SEED_INPUTS
from .errors import WorkflowError
from .graph import Graph, Link, Node

__all__ = ["apply_values", "settle_seeds"]


def apply_values(graph: Graph, values: Mapping[str, Any]) -> None:
    """Sets {"NODE.INPUT": value}. NODE: an id, else a title, else a class. Raises WorkflowError if it fits no node, or
    several."""
    problems = []
    for target, value in values.items():
        name, dot, key = _parted(graph, target)
        nodes = _called(graph, name)
        if not dot or not name or not key:
            problems.append(f"{target!r} is not NODE.INPUT")
        elif not nodes:
            known = ", ".join(node.name for node in graph.nodes.values())
            problems.append(f"{target!r}: there is no node {name!r}; the workflow has {known}")
        elif len(nodes) > 1:
            problems.append(
                f"{target!r}: several nodes are called {name!r}; use the id: {', '.join(n.id for n in nodes)}"
            )
        else:
            nodes[0].inputs[key] = _typed(value, nodes[0].inputs.get(key))
    if problems:
        raise WorkflowError(graph.source, problems)


def _parted(graph: Graph, target: str) -> tuple[str, str, str]:
    """At the last dot before which there is a node: titles have dots, and so have the inputs that a choice brings."""
    parts = target.split(".")
    for number in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:number])
        if _called(graph, name):
            return name, ".", ".".join(parts[number:])
    return target.rpartition(".")


def _typed(value: Any, before: Any) -> Any:
    """A text from the command line as the number or truth that it replaces; a text that replaces a text stays one."""
    if isinstance(value, str) and not isinstance(before, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, (bool, int, float)) else value
    return value


def _called(graph: Graph, name: str) -> list[Node]:
    if name in graph.nodes:
        return [graph.nodes[name]]
    titled = [node for node in graph.nodes.values() if node.title.lower() == name.lower()]
    return titled or [node for node in graph.nodes.values() if node.class_type.lower() == name.lower()]


def settle_seeds(graph: Graph, seed: int | None, draw: Callable[[], int]) -> dict[str, int]:
    """Every seed in the graph becomes a number: ``seed`` if given, a drawn one for -1. Returns node id -> seed.

    Nodes whose seed the editor keeps in one place get the same one, and it is written there too.
    """
    settled = {}
    drawn: dict[tuple[int, Any], int] = {}
    for node in graph.nodes.values():
        for key in SEED_INPUTS:
            given = node.inputs.get(key)
            if given is None or isinstance(given, (Link, bool)):
                continue
            container, place = graph.seed_places.get((node.id, key), (node.inputs, key))
            where = (id(container), place)
            if seed is not None:
                node.inputs[key] = seed
            elif given == -1 or given == "randomize":
                node.inputs[key] = drawn[where] if where in drawn else draw()
                drawn[where] = node.inputs[key]
            if isinstance(node.inputs[key], int):
                settled[node.id] = node.inputs[key]
            container[place] = node.inputs[key]
    return settled
