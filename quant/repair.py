"""repair: any readable dialect becomes the canonical form; with the original at hand, doubts are settled by numbers."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch

from ..files import Source, open_source
from .canonical import add_canonical, entry_bytes, kept_metadata
from .damage import damaged_scales
from .errors import Problem, QuantError
from .evidence import candidates
from .layer import Layer, dequantize_rows
from .markers import Provenance
from .measure import relative_error
from .output import assemblies_for, write_output
from .policy import PREFIXES
from .quantizer import compute_dtype
from .reader import QuantizedFile, read_quantized, settle_conflicts
from .report import QuantizationReport
from .stream import Meter, Progress, RowRun, read_run

__all__ = ["repair"]

_SAMPLE_ROWS = 128
# Relative error of a weight read rightly: at most 0.2 (4 bits); read wrongly (rotation): about 1.
_RIGHT = 0.35


def repair(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    original: str | os.PathLike | None = None,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Write the file in the form that ComfyUI's loader accepts; the report's ``warnings`` say what was changed.

    Stored weights keep their bytes. ``original`` is the model it was made from, unquantized: each layer is then read in
    every way its tensors allow, and the way that gives the original's weights wins over what the file claims.
    Raises QuantError naming every layer that stays unreadable.
    """
    started = time.monotonic()
    with open_source(source) as opened:
        found = read_quantized(opened)
        settle_conflicts(opened, found)
        notes: list[str] = []
        if original is not None:
            with open_source(original) as reference:
                _settle_by_original(opened, found, reference, notes)
        sound = (layer for layer in found.layers.values() if layer.dialect != "cast")
        found.problems += filter(None, (damaged_scales(opened, layer) for layer in sound))
        found.refuse_problems()
        assemblies, assembly_of = assemblies_for(opened, destination)
        report = QuantizationReport(
            opened.path, os.fspath(destination), "repair", [], sum(info.nbytes for info in opened.tensors.values())
        )
        layers = {layer.keys["weight"]: layer for layer in found.layers.values() if layer.dialect != "cast"}
        consumed = set(found.notes_keys)
        for layer in layers.values():
            consumed.update(key for suffix, key in layer.keys.items() if suffix != "weight")
            notes.extend(f"layer {layer.name!r}: {note}" for note in layer.notes)
        for key in opened:
            if key in layers:
                add_canonical(assembly_of(key), opened, layers[key])
            elif key in consumed:
                continue
            elif opened.info(key).dtype.startswith("F8_E") and len(opened.info(key).shape) < 2:
                assembly_of(key).cast(key, torch.bfloat16)
                notes.append(f"{key}: float8 of one dimension is written as bfloat16")
            else:
                assembly_of(key).copy(key)
        empty = sorted(found.notes_keys - {key for layer in layers.values() for key in layer.leftovers})
        notes.extend(f"{key}: dropped, it marks no quantized layer" for key in empty)
        report.warnings = notes
        report.bytes_after = sum(entry_bytes(assembly) for assembly in assemblies)
        record = _true_provenance(found, layers)
        meter = Meter(sum(assembly.read_bytes for assembly in assemblies), progress)
        write_output(opened, destination, assemblies, lambda assembly: kept_metadata(opened, record), meter)
        report.written = True
        report.seconds = time.monotonic() - started
        return report


def _true_provenance(found: QuantizedFile, layers: dict[str, Layer]) -> Provenance | None:
    """Our record without what no longer agrees with the markers written."""
    if found.record is None:
        return None
    markers = {layer.name: layer.marker() for layer in layers.values()}
    kept = {name: entry for name, entry in found.record.layers.items() if entry["marker"] == markers.get(name)}
    return replace(found.record, layers=kept)


def _original_key(reference: Source, name: str) -> str | None:
    """The original's key of a layer; either file may carry a prefix that the other lacks."""
    bare = next((name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix)), name)
    for spelled in (name, bare, *(prefix + bare for prefix in PREFIXES)):
        if f"{spelled}.weight" in reference:
            return f"{spelled}.weight"
    return None


def _settle_by_original(source: Source, found: QuantizedFile, reference: Source, notes: list[str]) -> None:
    if read_quantized(reference).layers:
        raise QuantError(reference.path, "is quantized itself; the original must be the unquantized model")
    unsettled = {problem.layer: problem for problem in found.problems if problem.kind == "undecidable"}
    unsettled.update(found.conflicts)
    names = [*found.layers, *unsettled]
    if not names:
        notes.append(f"no layer is quantized, so nothing was compared with {reference.path}")
    elif not any(_original_key(reference, name) for name in names):
        raise QuantError(
            reference.path,
            f"has none of the {len(names)} quantized layers ({names[0]!r} first): it is another model. Give the "
            "unquantized model that the file was made from, or none",
        )
    for name in names:
        layer = found.layers.get(name)
        if layer is not None and layer.dialect == "cast":
            continue
        key = _original_key(reference, name)
        if key is None:
            notes.append(f"layer {name!r}: {reference.path} has no such layer, so it was not compared")
            continue
        best, error = _best_reading(source, found, layer, name, reference, key)
        if best is None or not error <= _RIGHT:  # nan too
            found.layers.pop(name, None)
            found.conflicts.pop(name, None)
            found.problems = [problem for problem in found.problems if problem.layer != name]
            found.problems.append(
                Problem(
                    name,
                    "undecidable",
                    f"no reading of it gives the weights of {reference.path} (the best is {error:.0%} off): "
                    "another model, or a format that is not supported",
                )
            )
            continue
        found.layers[name] = best
        found.conflicts.pop(name, None)
        found.problems = [problem for problem in found.problems if problem.layer != name]


def _best_reading(
    source: Source, found: QuantizedFile, layer: Layer | None, name: str, reference: Source, key: str
) -> tuple[Layer | None, float]:
    """The reading closest to the original and its error; the file's own wins unless another is clearly better."""
    own = None if layer is None else _compared(source, layer, reference, key)
    best, lowest = own or (None, float("inf"))
    if own is not None and lowest < _RIGHT:
        lowest /= 2  # two rotations that both fit differ by a factor of ten
    for guess in candidates(found.evidence[name]):
        other = _compared(source, guess, reference, key)
        if other is not None and other[1] < lowest:
            best, lowest = other
    if own is not None and best is own[0]:
        return own
    if best is not None and layer is not None:
        note = f"its marker says {layer.marker()}, the original's weights say {best.marker()}"
        best = replace(best, notes=(note,), recipe=replace(best.recipe, full_precision=layer.recipe.full_precision))
    return best, lowest


def _compared(source: Source, reading: Layer, reference: Source, key: str) -> tuple[Layer, float] | None:
    """The reading in the original's shape, and its relative error on the first rows; None when the shapes differ."""
    info = reference.info(key)
    fitted = _with_original_shape(reading, info.shape)
    if fitted is None:
        return None
    rows = min(_SAMPLE_ROWS, fitted.shape[-2])
    expert = 0 if len(fitted.shape) == 3 else None
    wanted = read_run(reference, info, RowRun(0, rows)).to(compute_dtype(info.dtype))
    return fitted, relative_error(wanted, dequantize_rows(source, fitted, 0, rows, torch.float32, expert=expert))


def _with_original_shape(reading: Layer, shape: tuple[int, ...]) -> Layer | None:
    """The reading with the original's shape, which also tells how far a format has padded; None when it can't be."""
    if len(shape) != len(reading.shape):
        return None
    fitted = replace(reading, shape=shape, exact=True)
    return fitted if fitted.storage_shape() == reading.storage_shape() else None
