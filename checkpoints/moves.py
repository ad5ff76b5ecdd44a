"""Carrying out a conversion: tensors of the result are rows of tensors of the source, quantized layers too.

A plain tensor is copied byte by byte in pieces. A quantized layer is read whole, cut and joined by `quant.surgery`
(exact, no code changes) and written in the form that ComfyUI loads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..files.dtypes import name_of, nbytes, torch_dtype
from ..files.errors import FileError
from ..files.writer import tensor_bytes
from ..quant.layer import Layer, normalised
from ..quant.markers import MARKER, Provenance, checksum, encode_marker
from ..quant.output import Assembly
from ..quant.reader import settle_conflicts
from ..quant.stream import COPIED, Task, Writing
from ..quant.surgery import QuantizedWeight, fuse, split
from ..supported_models import Run, Target
from .opened import Checkpoint

_WEIGHT = ".weight"
# Bytes of a side tensor (scales per tensor or per row) that are read to plan with: joining depends on their values.
_SMALL = 1 << 20


@dataclass
class Move:
    """What one file of the result is made of. ``constants``: tensors that are known already; ``records``: what is
    noted of quantized layers, filled while writing."""

    checkpoint: Checkpoint
    targets: list[Target]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    def size_of(self, target: Target) -> int:
        """Stored bytes, side tensors of quantized layers aside."""
        sizes = []
        for run in target.runs:
            info = self.checkpoint.source.info(run.key)
            rows = self.checkpoint.shapes[run.key][0] if run.stop is not None else 1
            share = (run.stop - run.start) / max(rows, 1) if run.stop is not None else 1
            sizes.append(int(info.nbytes * share))
        return sum(sizes)

    def assembly(self, targets: Iterable[Target] | None = None, file_name: str = "", prefix: str = "") -> Assembly:
        """The content of a file with these targets (default: all), under ``prefix``. Raises FileError."""
        source, quantized = self.checkpoint.source, self.checkpoint.quantized
        settle_conflicts(source, quantized)
        quantized.refuse_problems()
        layers = {layer.keys["weight"]: layer for layer in quantized.layers.values() if layer.dialect != "cast"}
        planner, reader = _LayerReader(self.checkpoint, planning=True), _LayerReader(self.checkpoint)
        assembly = Assembly(source, file_name)
        chosen = self.targets if targets is None else targets
        for target in chosen:
            stored = [layers.get(run.key) for run in target.runs]
            if target.transposed:
                _add_transposed(assembly, self.checkpoint, target, prefix + target.name, any(stored))
            elif not any(stored):
                _add_plain(assembly, self.checkpoint, target, prefix + target.name)
            elif not all(stored):
                plain = next(run.key for run, layer in zip(target.runs, stored, strict=True) if layer is None)
                raise FileError(
                    self.checkpoint.path,
                    f"layer {target.name.removesuffix(_WEIGHT)!r} joins quantized weights and one that is not "
                    f"({plain}); convert the unquantized model and quantize the result",
                )
            else:
                self._add_quantized(assembly, planner, reader, target, stored, prefix)
        if targets is None:
            for name, tensor in self.constants.items():
                assembly.constant(prefix + name, tensor)
        return assembly

    def _add_quantized(
        self,
        assembly: Assembly,
        planner: _LayerReader,
        reader: _LayerReader,
        target: Target,
        layers: list[Layer],
        prefix: str,
    ) -> None:
        name = prefix + target.name.removesuffix(_WEIGHT)
        read = [(layer, run.start, run.stop) for layer, run in zip(layers, target.runs, strict=True)]
        try:
            weight = planner.joined(read)
        except ValueError as error:
            raise FileError(self.checkpoint.path, f"layer {target.name.removesuffix(_WEIGHT)!r}: {error}") from error
        entries = [(f"{name}.{suffix}", name_of(value.dtype), tuple(value.shape)) for suffix, value in
                   weight.tensors.items()]  # fmt: skip
        marker = weight.recipe.marker(layers[0].experts)
        record = {"marker": marker, "shape": list(weight.shape), "crc32": "0" * 8}
        self.records[name] = record
        size = sum(nbytes(dtype, shape) for _, dtype, shape in entries)

        def step(writing: Writing) -> Iterator[Task]:
            def handle(nothing: torch.Tensor) -> None:
                tensors = reader.joined(read).tensors
                record["crc32"] = f"{checksum(tensor_bytes(tensors['weight'])):08x}"
                for suffix, tensor in tensors.items():
                    writing.put(f"{name}.{suffix}", tensor)

            yield Task(lambda: torch.empty(0), handle, size, name)

        assembly.computed(entries, step, size)
        assembly.constant(f"{name}.{MARKER}", encode_marker(marker))

    def provenance(self) -> Provenance | None:
        """The note of our own about quantized layers, under their new names; None when the source has none."""
        found = self.checkpoint.quantized.record
        return None if found is None else Provenance(found.format, found.policy, found.source, self.records)


class _LayerReader:
    """Reads quantized layers; the last one stays in memory, for the next target may want its other rows.

    ``planning``: large tensors are on the meta device, which is enough to know what the result will look like.
    """

    def __init__(self, checkpoint: Checkpoint, planning: bool = False):
        self._checkpoint = checkpoint
        self._planning = planning
        self._whole = functools.lru_cache(maxsize=1)(self._read)

    def _read(self, name: str) -> QuantizedWeight:
        layer, source = self._checkpoint.quantized.layers[name], self._checkpoint.source
        tensors = {}
        for suffix, key in layer.keys.items():
            info = source.info(key)
            large = self._planning and info.nbytes > _SMALL
            tensors[suffix] = (
                torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta") if large else source.read(key)
            )
        return QuantizedWeight(normalised(tensors, layer), layer.recipe, layer.shape)

    def joined(self, runs: list[tuple[Layer, int, int | None]]) -> QuantizedWeight:
        """Raises ValueError where joining can't be exact."""
        pieces = []
        for layer, start, stop in runs:
            whole = self._whole(layer.name)
            if stop is None or (start, stop) == (0, whole.shape[0]):
                pieces.append(whole)
                continue
            sizes = [size for size in (start, stop - start, whole.shape[0] - stop) if size]
            pieces.append(split(whole, sizes)[1 if start else 0])
        return pieces[0] if len(pieces) == 1 else fuse(pieces)


def _add_plain(assembly: Assembly, checkpoint: Checkpoint, target: Target, name: str) -> None:
    """A tensor that is not quantized, copied in pieces."""
    source = checkpoint.source
    dtypes = {source.info(run.key).dtype for run in target.runs}
    if len(dtypes) > 1:
        raise FileError(
            checkpoint.path,
            f"{target.name!r} joins tensors of different types ({', '.join(sorted(dtypes))}): "
            f"{', '.join(run.key for run in target.runs)}; bring them to one type first",
        )
    spans = [_span(source.info(run.key), run) for run in target.runs]
    size = sum(stop - start for _, start, stop in spans)

    def step(writing: Writing) -> Iterator[Task]:
        offset = 0
        for key, first, end in spans:
            for start in range(first, end, COPIED):
                stop = min(start + COPIED, end)
                yield Task(
                    functools.partial(source.read_bytes, key, start, stop),
                    _putter(writing, name, offset + start - first),
                    stop - start,
                    key,
                )
            offset += end - first

    assembly.computed([(name, dtypes.pop(), target.shape)], step, size)


def _add_transposed(assembly: Assembly, checkpoint: Checkpoint, target: Target, name: str, quantized: bool) -> None:
    """A matrix, or a bank of them one by one, with rows and columns exchanged."""
    run, source = target.runs[0], checkpoint.source
    info = source.info(run.key)
    if quantized:
        problem = (
            f"layer {run.key.removesuffix(_WEIGHT)!r} is quantized along the dimension that would have to change; "
        )
        raise FileError(checkpoint.path, problem + "convert the unquantized model and quantize the result")
    start, stop = (0, info.shape[0]) if run.stop is None else (run.start, run.stop)
    # A bank is turned matrix by matrix; a matrix has to be turned as a whole.
    spans = [(row, row + 1) for row in range(start, stop)] if len(info.shape) > 2 else [(start, stop)]
    row_bytes = info.nbytes // max(info.shape[0], 1)

    def step(writing: Writing) -> Iterator[Task]:
        for first, end in spans:

            def handle(piece: torch.Tensor, first: int = first) -> None:
                writing.put(name, piece.transpose(-1, -2).contiguous(), (first - start) * row_bytes)

            yield Task(
                functools.partial(source.read_rows, run.key, first, end), handle, (end - first) * row_bytes, name
            )

    assembly.computed([(name, info.dtype, target.shape)], step, (stop - start) * row_bytes)


def _putter(writing: Writing, name: str, offset: int) -> Callable[[torch.Tensor], None]:
    return lambda piece: writing.put(name, piece, offset)


def _span(info: Any, run: Run) -> tuple[str, int, int]:
    if run.stop is None:
        return run.key, 0, info.nbytes
    row = info.nbytes // info.shape[0] if info.shape[0] else 0
    return run.key, run.start * row, run.stop * row
