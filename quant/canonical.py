"""Layers that are quantized already, written in the form that ComfyUI's loader accepts."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..files import Source
from ..files.dtypes import nbytes
from .formats import FORMATS
from .layer import Layer, canonical_tensors
from .markers import HEADER_KEY, MARKER, RECORD_KEY, Provenance, encode_marker
from .output import Assembly

__all__ = ["add_canonical", "entry_bytes", "kept_metadata"]


def add_canonical(assembly: Assembly, source: Source, layer: Layer) -> None:
    """Adds a layer that is quantized already, in the form that ComfyUI's loader accepts."""
    entries = FORMATS[layer.recipe.format].entries(layer.shape, layer.recipe)
    for suffix, key in layer.keys.items():
        info, name = source.info(key), f"{layer.name}.{suffix}"
        if suffix == "weight" and entries["weight"][0] == info.dtype:
            assembly.copy(key, name)
        elif suffix == "weight":
            # The same bytes under their right type.
            assembly.copy(key, name, dtype=entries["weight"][0])
        else:
            tensor = canonical_side(source, layer, suffix)
            if tensor is not None:
                assembly.constant(name, tensor)
    assembly.constant(f"{layer.name}.{MARKER}", encode_marker(layer.marker()))


def canonical_side(source: Source, layer: Layer, suffix: str) -> torch.Tensor | None:
    """One side tensor in canonical form; None when it is to be left out."""
    single = replace(layer, keys={suffix: layer.keys[suffix]})
    return canonical_tensors(source, single).get(suffix)


def entry_bytes(assembly: Assembly) -> int:
    return sum(nbytes(dtype, shape) for _, dtype, shape in assembly.entries)


def kept_metadata(source: Source, record: Provenance | None) -> dict[str, str]:
    metadata = {key: value for key, value in source.metadata.items() if key not in (HEADER_KEY, RECORD_KEY)}
    if record is not None:
        metadata[RECORD_KEY] = record.encode()
    return metadata
