"""dequantize: from a quantized file to plain floats, one piece in memory at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from ..files import Source, open_source
from ..files.dtypes import FLOAT_NAMES, name_of, parse_dtype
from .canonical import entry_bytes, kept_metadata
from .errors import QuantError
from .formats import FORMATS
from .kernels import peak_of
from .layer import Layer, dequantize_rows
from .output import Assembly, assemblies_for, write_output
from .reader import read_quantized, settle_conflicts
from .report import QuantizationReport
from .stream import Meter, Progress, RowRun, Task, Writing, row_runs

__all__ = ["dequantize"]

_RUN_BYTES = 16 << 20


def dequantize(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    dtype: str | torch.dtype = "bfloat16",
    progress: Progress | None = None,
) -> QuantizationReport:
    """Undo quantization: every quantized or float8 weight becomes ``dtype``, side tensors and markers disappear.

    Tensors that are not quantized are copied byte for byte. Padding is undone as far as the file says (our record, the
    bias, the scale of the input); what is left is reported. Raises QuantError for layers that can't be read rightly,
    or that come out NaN or infinite.
    """
    started = time.monotonic()
    target = parse_dtype(dtype)
    if name_of(target) not in FLOAT_NAMES:
        raise ValueError(f"dequantize to a float dtype (bfloat16, float16, float32), not {dtype}")
    with open_source(source) as opened:
        found = read_quantized(opened)
        settle_conflicts(opened, found)
        found.refuse_problems()
        assemblies, assembly_of = assemblies_for(opened, destination)
        report = QuantizationReport(
            opened.path, os.fspath(destination), name_of(target), [], sum(i.nbytes for i in opened.tensors.values())
        )
        consumed = set(found.notes_keys)
        layers = {layer.keys["weight"]: layer for layer in found.layers.values()}
        for layer in layers.values():
            consumed.update(key for suffix, key in layer.keys.items() if suffix != "weight")
        for key in opened:
            if key in consumed:
                continue
            layer = layers.get(key)
            if layer is not None and layer.dialect != "cast":
                add_dequantized(assembly_of(key), opened, layer, target)
                if not layer.exact:
                    report.warnings.append(
                        f"layer {layer.name!r} is written as {list(layer.shape)}: {layer.recipe.format} pads to "
                        f"multiples of {FORMATS[layer.recipe.format].padding} and the file does not say how far"
                    )
            elif opened.info(key).dtype.startswith("F8_E"):
                assembly_of(key).cast(key, target)
            else:
                assembly_of(key).copy(key)
        if not layers:
            report.warnings.append("nothing in it is quantized: its tensors are copied as they are")
        report.bytes_after = sum(entry_bytes(assembly) for assembly in assemblies)
        meter = Meter(sum(assembly.read_bytes for assembly in assemblies), progress)
        write_output(opened, destination, assemblies, lambda assembly: kept_metadata(opened, None), meter)
        report.written = True
        report.seconds = time.monotonic() - started
        return report


def add_dequantized(assembly: Assembly, source: Source, layer: Layer, dtype: torch.dtype) -> None:
    name = f"{layer.name}.weight"
    stored = source.info(layer.keys["weight"]).nbytes
    assembly.computed(
        [(name, name_of(dtype), layer.shape)], lambda writing: _dequantize_tasks(source, layer, dtype, writing), stored
    )


def _dequantize_tasks(source: Source, layer: Layer, dtype: torch.dtype, writing: Writing) -> Iterator[Task]:
    rows, columns = layer.shape[-2:]
    quantizer = layer.keys.get("pre_quant_scale")
    factor = None if quantizer is None else source.read(quantizer).reshape(-1)[:columns].to(dtype)
    runs = row_runs(layer.shape, columns * 4, _RUN_BYTES)
    stored = source.info(layer.keys["weight"]).nbytes
    for run in runs:
        expert = run.expert if len(layer.shape) == 3 else None

        def load(run=run, expert=expert) -> torch.Tensor:
            return dequantize_rows(source, layer, run.start, run.stop, dtype, expert=expert)

        def handle(weight: torch.Tensor, run=run) -> None:
            if factor is not None:
                weight = weight * factor  # the factor belongs to the input: W (x * s) = (W * s) x
            _refuse_broken(source, layer, run, weight)
            offset = (run.expert * rows + run.start) * columns * dtype.itemsize
            writing.put(f"{layer.name}.weight", weight, offset)

        yield Task(load, handle, stored // len(runs), layer.name)


def _refuse_broken(source: Source, layer: Layer, run: RowRun, weight: torch.Tensor) -> None:
    if weight.numel() and not torch.isfinite(peak_of(weight)):
        advice = "the file is broken. Get it again"
        if weight.dtype == torch.float16:
            advice = "too large for float16, or broken; try bfloat16"
        raise QuantError(
            source.where(layer.keys["weight"]),
            f"layer {layer.name!r} has NaN or infinite weights in rows {run.start} to {run.stop - 1}: {advice}",
        )
