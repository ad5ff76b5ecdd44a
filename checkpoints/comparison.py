"""How far the weights of one model are from another's, layer by layer: what quantization, a LoRA or a merge changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..files.dtypes import FLOAT_NAMES, torch_dtype
from ..files.errors import FileError
from ..files.source import Source
from ..quant.layer import Layer, dequantize_rows
from ..quant.policy import PREFIXES
from ..quant.reader import QuantizedFile, read_quantized
from ..quant.stream import Meter, Progress, RowRun, read_run, row_runs

_RUN_BYTES = 32 << 20
_LINES = 60


@dataclass(frozen=True)
class Difference:
    """One weight. ``sqnr`` signal to noise in decibels, infinite when equal; ``format`` of the compared model."""

    name: str
    format: str
    shape: tuple[int, ...]
    sqnr: float


@dataclass(frozen=True)
class Comparison:
    """``missing``: weights of the reference that the other lacks, or has in another shape; ``added``: the reverse."""

    differences: tuple[Difference, ...]
    missing: tuple[str, ...]
    added: tuple[str, ...]
    total: float

    def text(self) -> str:
        changed = [found for found in self.differences if math.isfinite(found.sqnr)]
        lines = [f"{len(self.differences)} weights compared, {len(changed)} differ; overall {decibels(self.total)}"]
        for title, names in (("only in the reference", self.missing), ("only in the compared model", self.added)):
            if names:
                lines.append(f"{len(names)} {title}: {', '.join(names[:5])}" + (", ..." if len(names) > 5 else ""))
        if changed:
            lines += ["", "worst first (signal to noise; each 6 dB halve the error):"]
            worst = sorted(changed, key=lambda found: found.sqnr)[:_LINES]
            lines += [f"{decibels(found.sqnr):>10}  {found.name}  {found.format}" for found in worst]
        return "\n".join(lines)


def decibels(value: float) -> str:
    return "equal" if value == math.inf else f"{value:.1f} dB"


def compare(reference: Source, other: Source, progress: Progress | None = None) -> Comparison:
    """Weights of the same names, in the form in which they are multiplied. Reads a run of rows at a time.

    Raises FileError when the two have no weight in common, QuantError for layers that can't be read.
    """
    first, second = read_quantized(reference), read_quantized(other)
    first.refuse_problems()
    second.refuse_problems()
    known, theirs = _weights(reference, first), _weights(other, second)
    common = [name for name in known if name in theirs and _fit(known[name], theirs[name])]
    if not common:
        raise FileError(other.path, f"has no weight in common with {reference.path}: these are different architectures")
    total = sum(math.prod(known[name].shape) * 4 for name in common)
    meter = Meter(total, progress)
    differences, signal, noise = [], 0.0, 0.0
    for name in common:
        power, error = _powers(reference, known[name], other, theirs[name], meter)
        signal, noise = signal + power, noise + error
        differences.append(Difference(name, theirs[name].label(other), theirs[name].shape, _sqnr(power, error)))
    missing = tuple(name for name in known if name not in set(common))
    added = tuple(name for name in theirs if name not in known)
    return Comparison(tuple(differences), missing, added, _sqnr(signal, noise))


def _sqnr(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    return -math.inf if signal == 0.0 else 10.0 * math.log10(signal / noise)


@dataclass(frozen=True)
class _Weight:
    key: str
    shape: tuple[int, ...]
    layer: Layer | None

    def label(self, source: Source) -> str:
        return source.info(self.key).dtype if self.layer is None else str(self.layer.recipe)

    def rows(self, source: Source, run: RowRun) -> torch.Tensor:
        if self.layer is None:
            info = source.info(self.key)
            if len(info.shape) == 2:
                return read_run(source, info, run).float()
            return source.read(self.key).reshape(1, -1).float()
        expert = run.expert if len(self.shape) == 3 else None
        return dequantize_rows(source, self.layer, run.start, run.stop, torch.float32, expert=expert)


def _weights(source: Source, found: QuantizedFile) -> dict[str, _Weight]:
    """By the name without a prefix: quantized layers and every float tensor."""
    layers = {layer.keys["weight"]: layer for layer in found.layers.values() if layer.dialect != "cast"}
    hidden = set(found.notes_keys)
    for layer in layers.values():
        hidden.update(key for suffix, key in layer.keys.items() if suffix != "weight")
    weights = {}
    for key, info in source.tensors.items():
        if key in hidden or 0 in info.shape:
            continue
        if key in layers:
            weights[_bare(key)] = _Weight(key, layers[key].shape, layers[key])
        elif info.dtype in FLOAT_NAMES or info.dtype.startswith("F8_E"):
            torch_dtype(info.dtype)
            weights[_bare(key)] = _Weight(key, info.shape, None)
    return weights


def _bare(key: str) -> str:
    return next((key[len(prefix) :] for prefix in PREFIXES[:1] if key.startswith(prefix)), key)


def _fit(first: _Weight, second: _Weight) -> bool:
    """Padded shapes (nvfp4, mxfp8) fit where the file does not say how far they are padded."""
    if first.shape == second.shape:
        return True
    inexact = [weight for weight in (first, second) if weight.layer is not None and not weight.layer.exact]
    near = all(abs(a - b) < 32 for a, b in zip(first.shape, second.shape, strict=False))
    return bool(inexact) and len(first.shape) == len(second.shape) and near


def _powers(reference: Source, first: _Weight, other: Source, second: _Weight, meter: Meter) -> tuple[float, float]:
    """(sum of squares of the reference, of the difference)"""
    signal = noise = 0.0
    for run in _runs(first, second):
        ours, theirs = first.rows(reference, run), second.rows(other, run)
        rows, columns = min(ours.shape[0], theirs.shape[0]), min(ours.shape[1], theirs.shape[1])
        ours, theirs = ours[:rows, :columns], theirs[:rows, :columns]
        signal += float(ours.square().sum())
        noise += float((ours - theirs).square().sum())
        meter.add(ours.numel() * 4, first.key)
    return signal, noise


def _runs(first: _Weight, second: _Weight) -> Iterator[RowRun]:
    """Runs of rows for matrices and banks; anything else is one run."""
    matrix = all(weight.layer is not None or len(weight.shape) == 2 for weight in (first, second))
    if not matrix:
        yield RowRun(0, 1)
        return
    shape = tuple(min(a, b) for a, b in zip(first.shape, second.shape, strict=True))
    yield from row_runs(shape, shape[-1] * 4, _RUN_BYTES)
