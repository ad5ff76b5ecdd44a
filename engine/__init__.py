"""The embedded engine: runs workflows with pip packages alone. ``nativedit.run`` is ``run`` of this package."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .graph import Graph

__all__ = ["RunResult", "run"]

SEED_INPUTS = ("seed", "noise_seed")
LARGEST_RANDOM_SEED = 2**53 - 1  # exact in the JSON of every browser

# The host is one for the process, so runs in threads wait for each other.
_running = threading.RLock()
_cache: Any = None


@dataclass
class RunResult:
    """What a run made. Times in seconds; ids are the workflow's.

    pictures: files, in the order in which they were saved; files: the same of models and statistics, but not of
    what a server wrote in its own folder; outputs: node id -> what the node gave, by position;
    ui: node id -> what an output node reports, as ComfyUI's history has it; seeds: node id -> seed used;
    cached: ids of nodes that were not run again because nothing they depend on changed; notes: what nodes
    had to say (how much of a LoRA fitted); prompt: the workflow as run.
    """

    pictures: list[Path] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    outputs: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    ui: dict[str, Any] = field(default_factory=dict)
    seeds: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cached: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prompt: dict[str, Any] = field(default_factory=dict)


def run(
    workflow: str | os.PathLike | Mapping[str, Any],
    *,
    # One or several folders in the layout of ComfyUI's models/; the pack's demo files are always found.
    models_dir: str | os.PathLike | Iterable[str | os.PathLike] | None = None,
    output_dir: str | os.PathLike = "output",
    engine: str = "embedded",  # or the address of a running ComfyUI
    input_dir: str | os.PathLike | None = None,  # where LoadImage looks; None = the workflow's folder
    values: Mapping[str, Any] | None = None,  # {"NODE.INPUT": value}, NODE being an id, a title or a class
    seed: int | None = None,  # for every seed in the graph; a seed of -1 is drawn
    progress: bool | None = None,  # show it on standard error; None = if that is a terminal
) -> RunResult:
    """Runs a workflow, which is a path, JSON text or a dict, and saves its pictures under the output folder.

    The models folders, one or several, are laid out as ComfyUI's; the demo files of the pack are always found. Pictures
    that the workflow reads are looked for in the input folder, or else beside the workflow. The engine is the embedded
    one or the address of a running ComfyUI. Values are set before the run, each named as a node's id, title or class, a
    dot and the input; the seed is for every seed of the graph, and a seed of minus one is drawn. Progress is shown on
    standard error, unless said otherwise only where that is a terminal.

    Raises WorkflowError, before anything is loaded; NodeError, which names the node; and FileNotFoundError.
    """
    from .graph import read_workflow
    from .overrides import apply_values, settle_seeds

    if engine == "embedded":
        from .declare import widgets_of
    else:
        from .remote import Server

        widgets_of = Server(engine).widgets_of
    graph = read_workflow(workflow, widgets_of)
    apply_values(graph, values or {})
    seeds = settle_seeds(graph, seed, lambda: random.SystemRandom().randint(0, LARGEST_RANDOM_SEED))
    if engine != "embedded":
        from .remote import run_on_server

        result = run_on_server(graph, engine, Path(output_dir), progress=progress)
    else:
        if input_dir is None and not isinstance(workflow, Mapping) and os.path.exists(workflow):
            input_dir = Path(workflow).parent
        result = _run_embedded(graph, models_dir, Path(output_dir), Path(input_dir or "input"), progress)
    result.seeds = seeds
    result.prompt = graph.prompt()
    return result


def _run_embedded(graph: Graph, models_dir: Any, output_dir: Path, input_dir: Path, progress: bool | None) -> RunResult:
    global _cache
    from .. import host as hosts
    from .declare import node_classes
    from .execute import Cache, Execution
    from .host import EngineHost
    from .model_folders import ModelFolders
    from .progress import Progress
    from .validate import validate

    shown = Progress.for_terminal()
    if progress is not None:
        shown = Progress(lines=progress, bars=progress and shown.bars)
    elif not shown.bars:
        shown = Progress()
    host = EngineHost(ModelFolders(models_dir), output_dir, input_dir, progress=shown)
    with _running:
        before = hosts._current
        hosts.set_host(host)
        try:
            classes = node_classes()
            order, schemas = validate(graph, classes, host.folders)
            _cache = _cache or Cache()
            execution = Execution(graph, order, schemas, classes, host, _cache)
            execution.run()
        finally:
            hosts.set_host(before)
    result = RunResult(seconds=execution.seconds, cached=execution.cached, notes=shown.notes)
    for node_id, outcome in execution.outcomes.items():
        result.outputs[node_id] = outcome.values
        if outcome.ui is not None:
            result.ui[node_id] = outcome.ui
            for name, paths in (("images", result.pictures), ("files", result.files)):
                paths += [host.path_of(one) for one in outcome.ui.get(name, ()) if one["type"] == "output"]
    return result
