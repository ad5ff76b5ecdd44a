"""Quantizes one weight of any size, run by run, with the same bytes as in one go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..files import Source
from .codebook import CodebookSampler
from .errors import QuantError
from .formats import FORMATS, Recipe
from .kernels import peak_of
from .kitchen import has_tensor_scale, quantize_matrix, tensor_scale
from .layer import Layer, dequantize_rows
from .markers import checksum
from .stream import ROW_ALIGNMENT, RowRun, Task, Writing, read_run, row_runs
from .workers import spread

__all__ = ["Quantizer", "Rows", "compute_dtype"]

# Weights quantized at once: bounds the temporaries, which are fp32 and several. On a CPU they should stay in its
# caches: nvfp4 and mxfp8 take twice to three times as long on a whole weight. Smaller batches, on the other hand, have
# the threads wait for each other's Python more often: with half of this float8, int8_convrot and nvfp4 took longer.
_BATCH_CPU = 1 << 20
_BATCH_DEVICE = 64 << 20


def compute_dtype(stored: str) -> torch.dtype:
    """Arithmetic in the weight's own dtype, as ComfyUI does it; fp16 is widened, its range is too small for scales."""
    return torch.bfloat16 if stored in ("BF16", "F8_E4M3", "F8_E5M2") else torch.float32


@dataclass(frozen=True)
class Rows:
    """The float rows of one weight, wherever they come from."""

    source: Source
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    quantized: Layer | None = None

    def load(self, run: RowRun, room: torch.Tensor | None = None) -> torch.Tensor:
        if self.quantized is not None:
            expert = run.expert if len(self.shape) == 3 else None
            return dequantize_rows(self.source, self.quantized, run.start, run.stop, self.dtype, expert=expert)
        # A 1x1 convolution is read as the matrix that it is.
        return read_run(self.source, replace(self.source.info(self.key), shape=self.shape), run, room)

    def room(self, run: RowRun) -> int:
        """How much memory `load` can read into; 0 where it makes its result itself."""
        return 0 if self.quantized is not None else (run.stop - run.start) * self._row_bytes()

    def runs(self) -> list[RowRun]:
        return row_runs(self.shape, self._row_bytes())

    def _row_bytes(self) -> int:
        if self.quantized is not None:
            return self.shape[-1] * self.dtype.itemsize
        return self.source.info(self.key).nbytes // max(math.prod(self.shape[:-1]), 1)


class _Common:
    """What all rows of one matrix share: gathered while looking, fixed at the first store.

    One object per matrix: reading runs ahead, so the next matrix may be begun before this one is stored.
    """

    def __init__(self, scale_of: Callable[[torch.Tensor], torch.Tensor | None], sampler: CodebookSampler | None):
        self.scale_of = scale_of
        self.sampler = sampler
        self.peaks: list[torch.Tensor] = []
        self._settled: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    def settled(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(scale of the whole tensor, codebook), None where the format has none."""
        if self._settled is None:
            scale = self.scale_of(torch.stack(self.peaks).amax())
            codebook = None if self.sampler is None else self.sampler.codebook().to(device)
            self._settled = (scale, codebook)
        return self._settled


class Quantizer:
    """Quantizes one weight and sends its tensors to the writer."""

    def __init__(self, rows: Rows, layer: str, recipe: Recipe, device: torch.device, record: dict[str, Any]):
        self.rows = rows
        self.layer = layer
        self.recipe = recipe
        self.device = device
        self.record = record
        self.entries = FORMATS[recipe.format].entries(rows.shape, recipe)
        self.matrix_entries = FORMATS[recipe.format].entries(rows.shape[-2:], recipe)
        self._crc = 0

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor | None:
        """The scale of the whole matrix, from its largest magnitude."""
        return tensor_scale(self.recipe, amax)

    def codes_of(
        self, weight: torch.Tensor, scale: torch.Tensor | None, codebook: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Some rows of the matrix as canonical tensors. Called from several threads."""
        return quantize_matrix(weight, self.recipe, scale=scale, codebook=codebook)

    def step(self, writing: Writing) -> Iterator[Task]:
        runs = self.rows.runs()
        experts = self.rows.shape[0] if len(self.rows.shape) == 3 else 1
        for expert in range(experts):
            yield from self._matrix(writing, [run for run in runs if run.expert == expert])

    def _matrix(self, writing: Writing, runs: list[RowRun]) -> Iterator[Task]:
        """One matrix: in one pass when it is a single run or each row stands for itself, else in two."""
        # A weight that is quantized in one call has its codebook chosen there.
        at_once = len(runs) == 1 and len(range(0, self.rows.shape[-2], self._batch_rows())) == 1
        sampler = None
        if self.recipe.codebook and not at_once:
            sampler = CodebookSampler(self.rows.shape[-2:], self.recipe)
        common = _Common(self.scale_of, sampler)
        if len(runs) > 1 and (self.recipe.codebook or has_tensor_scale(self.recipe)):
            for run in runs:
                yield self._task(run, lambda run, weight, peak: self._look(common, run, weight, peak), counted=False)
            for run in runs:
                yield self._task(run, lambda run, weight, peak: self._store(common, writing, run, weight))
            return
        for run in runs:
            yield self._task(run, lambda run, *loaded: self._look_and_store(common, writing, run, *loaded))

    def _task(self, run: RowRun, handle: Callable[..., None], counted: bool = True) -> Task:
        count = (run.stop - run.start) * self.rows.shape[-1] * self.rows.dtype.itemsize

        def load(*room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weight = self.rows.load(run, *room)
            return weight, self._peak(weight, run)

        return Task(load, lambda loaded: handle(run, *loaded), count * counted, self.layer, self.rows.room(run))

    def _look(self, common: _Common, run: RowRun, weight: torch.Tensor, peak: torch.Tensor) -> None:
        common.peaks.append(peak)
        if common.sampler is not None:
            for part, piece in self._batches(run, weight):
                common.sampler.add(part, self._prepared(piece).cpu())

    def _peak(self, weight: torch.Tensor, run: RowRun) -> torch.Tensor:
        wide = weight if weight.dtype.itemsize > 1 else weight.to(self.rows.dtype)
        peak = peak_of(wide).to(self.rows.dtype) if weight.numel() else torch.zeros((), dtype=self.rows.dtype)
        if not torch.isfinite(peak):
            where = "" if len(self.rows.shape) == 2 else f" of expert {run.expert}"
            raise QuantError(
                self.rows.source.where(self.rows.key),
                f"layer {self.layer!r} has NaN or infinite weights in rows {run.start} to {run.stop - 1}{where}: "
                "the file is broken. Get it again, or leave the layer out (exclude, in a graph keep)",
            )
        return peak

    def _look_and_store(
        self, common: _Common, writing: Writing, run: RowRun, weight: torch.Tensor, peak: torch.Tensor
    ) -> None:
        self._look(common, run, weight, peak)
        self._store(common, writing, run, weight)

    def _store(self, common: _Common, writing: Writing, run: RowRun, weight: torch.Tensor) -> None:
        scale, codebook = common.settled(self.device)

        def quantized(batch: tuple[RowRun, torch.Tensor]) -> tuple[RowRun, dict[str, torch.Tensor]]:
            part, piece = batch
            return part, self.codes_of(self._prepared(piece), scale, codebook)

        apply = spread if self.device.type == "cpu" else map
        for part, tensors in apply(quantized, self._batches(run, weight)):
            for suffix, tensor in tensors.items():
                self._put(writing, suffix, part, tensor.cpu())

    def _batch_rows(self) -> int:
        limit = _BATCH_CPU if self.device.type == "cpu" else _BATCH_DEVICE
        if self.device.type == "cpu" and self.recipe.format.startswith("float8"):
            limit *= 2  # its temporaries are half as wide
        # Block scales are stored in tiles of so many rows; so are the rows of which a codebook is chosen at once.
        step = ROW_ALIGNMENT if FORMATS[self.recipe.format].padding > 1 or self.recipe.codebook else 1
        return max(step, limit // max(self.rows.shape[-1], 1) // step * step)

    def _batches(self, run: RowRun, weight: torch.Tensor) -> Iterator[tuple[RowRun, torch.Tensor]]:
        step = self._batch_rows()
        for start in range(0, weight.shape[0], step):
            piece = weight[start : start + step]
            yield RowRun(run.start + start, run.start + start + piece.shape[0], run.expert), piece

    def _prepared(self, piece: torch.Tensor) -> torch.Tensor:
        return piece.to(self.device).to(self.rows.dtype)

    def _put(self, writing: Writing, suffix: str, run: RowRun, tensor: torch.Tensor) -> None:
        name = f"{self.layer}.{suffix}"
        shape = self.matrix_entries[suffix][1]
        matrix_bytes = tensor.element_size()
        for size in shape:
            matrix_bytes *= size
        offset = run.expert * matrix_bytes
        by_rows = bool(shape) and suffix != "weight_codebook"
        if by_rows:
            offset += run.start * (matrix_bytes // shape[0])
        elif run.start:
            return
        writing.put(name, tensor, offset, self._sum if suffix == "weight" else None)

    def _sum(self, data: memoryview) -> None:
        self._crc = checksum(data, self._crc)
        self.record["crc32"] = f"{self._crc:08x}"
