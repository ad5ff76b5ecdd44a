"""``nativedit calibrate``: runs a workflow's sampling and keeps what the model's layers were given."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..files.errors import OutputError
from ..files.paths import refuse_same_file
from ..quant.calibration import Calibration, Watcher, write_calibration

__all__ = ["Calibrate", "calibrate", "watched"]

_watch: _Watch | None = None


class _Watch:
    def __init__(self) -> None:
        self.watcher = Watcher()
        self.file: str | None = None

    def refuse_other(self, file: str) -> None:
        if self.file not in (None, file):
            raise ValueError(
                f"this workflow samples {self.file} and {file}: statistics are of one model. Calibrate with a workflow "
                "that samples one of them"
            )
        self.file = file


@contextmanager
def watched(file: str, module: torch.nn.Module) -> Iterator[None]:
    """Around the sampling of the model that was loaded from ``file``: its layers' inputs are kept while a calibration
    runs."""
    if _watch is None:
        yield
        return
    _watch.refuse_other(file)
    with _watch.watcher.on(module):
        yield


def calibrate(
    workflow: str | os.PathLike | Mapping[str, Any],
    destination: str | os.PathLike,
    *,
    steps: int | None = None,
    models_dir: str | os.PathLike | Iterable[str | os.PathLike] | None = None,
    input_dir: str | os.PathLike | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int | None = None,
    progress: bool | None = None,
) -> Calibration:
    """Runs ``workflow`` (see ``run``) with ``steps`` steps in every sampler, and writes the statistics of the linear
    layers of the one model that it samples.

    Raises what ``run`` raises; ValueError when nothing, or more than one model, is sampled; OutputError.
    """
    global _watch
    from .. import engine

    folder = os.path.dirname(os.path.abspath(destination))
    if not os.path.isdir(folder):  # before the long work
        raise OutputError(destination, f"can't be written: there is no folder {folder}; make it first")
    if not isinstance(workflow, Mapping):
        refuse_same_file(destination, [workflow])
    values = {**(values or {}), **({} if steps is None else _steps_of(workflow, steps))}
    with engine._running, tempfile.TemporaryDirectory() as pictures:
        kept, engine._cache = engine._cache, None  # a sampler that is not run again shows nothing
        _watch = watch = _Watch()
        try:
            engine.run(
                workflow,
                models_dir=models_dir,
                output_dir=pictures,
                input_dir=input_dir,
                values=values,
                seed=seed,
                progress=progress,
            )
        finally:
            _watch, engine._cache = None, kept
    about: dict[str, Any] = {"model": watch.file}
    if steps is not None:
        about["steps"] = steps
    calibration = watch.watcher.calibration(**about)
    write_calibration(calibration, destination)
    return calibration


def _steps_of(workflow: str | os.PathLike | Mapping[str, Any], steps: int) -> dict[str, int]:
    from .declare import widgets_of
    from .graph import read_workflow

    graph = read_workflow(workflow, widgets_of)
    return {f"{node.id}.steps": steps for node in graph.nodes.values() if isinstance(node.inputs.get("steps"), int)}


class Calibrate:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("workflow", help="as exported from ComfyUI (File > Export), or a picture it saved")
        parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the statistics, a safetensors file")
        parser.add_argument("--steps", type=int, metavar="N", help="steps of every sampler (default: the workflow's)")
        parser.add_argument("--seed", type=int, help="for every seed in the workflow; -1 draws one")
        parser.add_argument("--models-dir", action="append", metavar="DIR", help="as of nativedit run")
        parser.add_argument("--input-dir", metavar="DIR", help="where LoadImage looks (default: the workflow's folder)")
        parser.add_argument("--quiet", action="store_true", help="print nothing but the result")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        from .command import default_models_dirs

        if args.steps is not None and args.steps < 1:
            raise ValueError(f"--steps {args.steps}: at least one step is needed")
        found = calibrate(
            args.workflow,
            Path(args.output),
            steps=args.steps,
            models_dir=args.models_dir or default_models_dirs(),
            input_dir=args.input_dir,
            seed=args.seed,
            progress=not args.quiet,
        )
        print(f"{args.output}: {len(found.layers)} layers, up to {found.about['rows']} inputs each")
        return 0
