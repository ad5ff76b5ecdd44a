"""Runs a checked graph, node by node, and keeps what did not change for the next run in this process."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from .errors import NodeError
from .graph import Graph, Link, Node
from .host import EngineHost
from .model_folders import FileList

__all__ = ["Cache", "Execution", "Outcome"]

KEPT = "nativedit"  # the entry of a node's _meta that Sample (NativeDiT) writes


@dataclass(frozen=True)
class Outcome:
    """What a node gave: outputs by position, what it tells the interface (saved pictures), and what it wrote beside its
    title in the prompt (settings of a sampler), which pictures of later runs carry too."""

    values: tuple[Any, ...]
    ui: Mapping[str, Any] | None = None
    kept: Mapping[str, Any] | None = None


@dataclass
class Cache:
    """Outcomes by the signature of a node and of everything it depends on. Only the last run's are kept."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)


@dataclass
class Execution:
    """One run. Afterwards ``outcomes``, ``seconds`` (node id -> time) and ``cached`` (ids not run again) are filled."""

    graph: Graph
    order: list[str]
    schemas: Mapping[str, Any]
    classes: Mapping[str, type]
    host: EngineHost
    cache: Cache
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cached: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Raises NodeError. What was done before stays in the cache, so that a second try starts there."""
        prompt = self.graph.prompt()
        extra = {"workflow": self.graph.workflow} if self.graph.workflow is not None else {}
        signatures: dict[str, str] = {}
        try:
            for number, node_id in enumerate(self.order, 1):
                node = self.graph.nodes[node_id]
                started = time.perf_counter()
                signature = signatures[node_id] = self._guarded(node, self._signature, node, signatures)
                outcome = self._still_good(node, self.cache.outcomes.get(signature))
                self.host.progress.node(number, len(self.order), node.name, " (cached)" if outcome else "")
                if outcome is None:
                    hidden = SimpleNamespace(prompt=prompt, extra_pnginfo=extra, unique_id=node_id)
                    outcome = self._guarded(node, self._execute, node, hidden)
                    outcome = replace(outcome, kept=prompt[node_id].get("_meta", {}).get(KEPT))
                    self.cache.outcomes[signature] = outcome
                else:
                    self.cached.append(node_id)
                    if outcome.kept is not None:
                        prompt[node_id].setdefault("_meta", {})[KEPT] = outcome.kept
                self.outcomes[node_id] = outcome
                self.seconds[node_id] = time.perf_counter() - started
        finally:
            used = set(signatures.values())
            self.cache.outcomes = {key: value for key, value in self.cache.outcomes.items() if key in used}

    def _guarded(self, node: Node, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except NodeError:
            raise
        except Exception as error:
            problem = str(error) or type(error).__name__
            if not isinstance(error, (ValueError, OSError, ImportError)):
                problem = f"{type(error).__name__}: {problem}"
            raise NodeError(node.id, node.class_type, node.title, problem) from error

    def _execute(self, node: Node, hidden: SimpleNamespace) -> Outcome:
        given = {}
        for key, value in node.inputs.items():
            given[key] = self.outcomes[value.node].values[value.output] if isinstance(value, Link) else value
        cls = self.classes[node.class_type]
        # Hidden values belong to one call, so they sit on a class made for it, as in ComfyUI.
        result = type(cls.__name__, (cls,), {"hidden": hidden}).execute(**given)
        return Outcome(tuple(result.result or ()), getattr(result, "ui", None))

    def _signature(self, node: Node, signatures: Mapping[str, str]) -> str:
        """Changes with the class, the inputs, the files they name, and everything upstream."""
        cls, schema = self.classes[node.class_type], self.schemas[node.class_type]
        parts: list[Any] = [node.class_type]
        for key, value in sorted(node.inputs.items()):
            parts.append(
                [key, "link", signatures[value.node], value.output] if isinstance(value, Link) else [key, value]
            )
        for item in schema.inputs:
            options, name = getattr(item, "options", None), node.inputs.get(item.id)
            if isinstance(options, FileList) and name in self.host.folders.files(options.folder):
                path = self.host.folders.files(options.folder)[name]
                stat = path.stat()
                parts.append([str(path), stat.st_size, stat.st_mtime_ns])
        fingerprint = getattr(cls, "fingerprint_inputs", None)
        if fingerprint is not None:
            literal = {k: v for k, v in node.inputs.items() if not isinstance(v, Link)}
            parts.append(fingerprint(**literal))
        if schema.is_output_node or schema.not_idempotent:
            parts += [node.id, str(self.host.output_dir.absolute())]
        parts.append(str(self.host.device))
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()

    def _still_good(self, node: Node, outcome: Outcome | None) -> Outcome | None:
        """A picture that was deleted since is made again."""
        if outcome is None or not outcome.ui:
            return outcome
        shown = [entry for entries in outcome.ui.values() for entry in entries]
        written = [entry for entry in shown if isinstance(entry, Mapping) and "filename" in entry]
        return outcome if all(self.host.path_of(entry).is_file() for entry in written) else None
