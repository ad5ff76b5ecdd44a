"""Two files of one architecture, weight by weight: what a quantization, a fine-tune or a conversion changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..checkpoints.load import recognise
from ..checkpoints.opened import Checkpoint, open_checkpoint
from ..checkpoints.stored_config import is_config
from ..quant.layer import Layer, dequantize_rows
from ..quant.measure import relative_error, sqnr
from ..supported_models import Match, Part

__all__ = ["WeightResult", "compare_weights"]


@dataclass(frozen=True)
class WeightResult:
    """One weight under our module's name. ``stored``, ``other_stored``: how the files hold it; ``sqnr`` in decibels,
    infinite when exact; ``problem``: a reason that no number can be given."""

    name: str
    shape: tuple[int, ...]
    stored: str
    other_stored: str
    relative_error: float
    sqnr: float
    problem: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.problem) or self.relative_error > 0


@dataclass(frozen=True)
class _Weights:
    """One file's weights under our names, quantized ones undone."""

    checkpoint: Checkpoint
    match: Match
    places: dict[str, tuple[str, Part]]
    layers: dict[str, Layer]

    @classmethod
    def of(cls, checkpoint: Checkpoint, architecture: str | None) -> _Weights:
        match = recognise(checkpoint, architecture=architecture)
        keys = [key for key in checkpoint.shapes if not is_config(key)]
        places = {part.name: (key, part) for key in keys for part in match.parts(key)}
        layers = {layer.keys["weight"]: layer for layer in checkpoint.quantized.layers.values()}
        return cls(checkpoint, match, places, {key: layer for key, layer in layers.items() if layer.dialect != "cast"})

    def stored(self, name: str) -> str:
        key = self.places[name][0]
        return str(self.layers[key].recipe) if key in self.layers else self.checkpoint.source.info(key).dtype

    def read(self, name: str) -> torch.Tensor:
        """float32"""
        key, part = self.places[name]
        source, layer = self.checkpoint.source, self.layers.get(key)
        if layer is None:
            return part.take(source.read(key)).float()
        rows, columns = layer.shape[-2:]
        if len(layer.shape) == 3:
            experts = range(layer.shape[0])
            whole = torch.stack([dequantize_rows(source, layer, 0, rows, torch.float32, expert=e) for e in experts])
        else:
            whole = dequantize_rows(source, layer, 0, rows, torch.float32)
        if "pre_quant_scale" in layer.keys:
            whole = whole * source.read(layer.keys["pre_quant_scale"]).reshape(-1)[:columns].float()
        return part.take(whole)


def compare_weights(
    path: str | os.PathLike, other: str | os.PathLike, *, architecture: str | None = None
) -> Iterator[WeightResult]:
    """One weight in memory at a time, in the order of the first file. The second file is the reference.

    Raises FileError for a file that is no diffusion model we know, ValueError when the two are not of one architecture.
    """
    with open_checkpoint(path, component="transformer") as a, open_checkpoint(other, component="transformer") as b:
        first, second = _Weights.of(a, architecture), _Weights.of(b, architecture)
        if first.match.architecture is not second.match.architecture:
            raise ValueError(
                f"{a.path} is {first.match.architecture.title} and {b.path} is {second.match.architecture.title}: "
                "only models of one architecture are compared"
            )
        for checkpoint in (a, b):
            checkpoint.quantized.refuse_problems()
        for name in dict.fromkeys((*first.places, *second.places)):
            yield _compare(name, first, second)


def _compare(name: str, first: _Weights, second: _Weights) -> WeightResult:
    missing = [weights.checkpoint.path for weights in (first, second) if name not in weights.places]
    if missing:
        there = first if name in first.places else second
        shape = tuple(there.read(name).shape)
        return WeightResult(name, shape, "", "", float("inf"), float("-inf"), f"not in {missing[0]}")
    value, reference = first.read(name), second.read(name)
    stored = first.stored(name), second.stored(name)
    if value.shape != reference.shape:
        problem = f"shape {list(value.shape)}, the other {list(reference.shape)}"
        return WeightResult(name, tuple(value.shape), *stored, float("inf"), float("-inf"), problem)
    error = relative_error(reference, value)
    return WeightResult(name, tuple(value.shape), *stored, error, sqnr(reference, value))
