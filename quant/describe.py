"""What a quantized file holds, for people and for `inspect`: from headers and markers alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ..files import Source, open_source
from .errors import Problem
from .formats import FORMATS
from .layer import Layer
from .reader import QuantizedFile, read_quantized

__all__ = ["LayerDescription", "QuantizationInfo", "describe"]


@dataclass(frozen=True)
class LayerDescription:
    """One quantized layer. ``shape`` logical; ``stored_bytes`` with side tensors; ``bits`` per weight, all included."""

    name: str
    format: str
    recipe: str
    dialect: str
    shape: tuple[int, ...]
    stored_bytes: int
    marker: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def bits(self) -> float:
        count = 1
        for size in self.shape:
            count *= size
        return 8 * self.stored_bytes / max(count, 1)


@dataclass(frozen=True)
class QuantizationInfo:
    """``counts`` recipe -> layers; ``comfyui`` the first version that reads all of it ("" when not quantized);
    ``problems`` what can't be read as it stands; ``record`` what we noted when we wrote the file."""

    path: str
    layers: tuple[LayerDescription, ...]
    problems: tuple[Problem, ...]
    counts: dict[str, int]
    comfyui: str
    shapes: dict[str, tuple[int, ...]] = field(repr=False, default_factory=dict)
    record: dict[str, Any] | None = None

    @property
    def is_quantized(self) -> bool:
        return bool(self.layers or self.problems)


def _describe_layer(source: Source, layer: Layer) -> LayerDescription:
    cast = layer.dialect == "cast"
    return LayerDescription(
        layer.name,
        layer.recipe.format,
        f"{layer.recipe.format} cast" if cast else str(layer.recipe),
        layer.dialect,
        layer.shape,
        sum(source.info(key).nbytes for key in layer.keys.values()),
        {} if cast else layer.marker(),
        layer.notes,
    )


def _needed_version(found: QuantizedFile) -> str:
    versions = [
        FORMATS[layer.recipe.format].since.get("bank" if len(layer.shape) == 3 else "linear", "")
        for layer in found.layers.values()
        if layer.dialect != "cast"
    ]
    if any("pre_quant_scale" in layer.keys for layer in found.layers.values()):
        versions.append("0.30.0")
    return max(versions, key=lambda version: [int(part) for part in version.split(".") if part], default="")


def describe(source: str | os.PathLike | Source) -> QuantizationInfo:
    """Describe the quantized layers of a file or folder. Reads no weights: headers, and markers of some 30 bytes each.

    Raises FileError, and QuantError when a header's quantization entry can't be understood.
    """
    if isinstance(source, Source):
        return _describe(source)
    with open_source(source) as opened:
        return _describe(opened)


def _describe(source: Source) -> QuantizationInfo:
    found = read_quantized(source)
    layers = tuple(_describe_layer(source, layer) for layer in found.layers.values())
    counts: dict[str, int] = {}
    for layer in layers:
        counts[layer.recipe] = counts.get(layer.recipe, 0) + 1
    record = None
    if found.record is not None:
        record = {"format": found.record.format, "policy": found.record.policy, "source": found.record.source}
    return QuantizationInfo(
        source.path,
        layers,
        (*found.problems, *found.conflicts.values()),
        counts,
        _needed_version(found),
        found.logical_shapes(source),
        record,
    )
