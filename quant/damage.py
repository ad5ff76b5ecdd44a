"""Scales that no reading can make good: NaN, infinite or negative numbers in a quantized layer."""

from __future__ import annotations

import torch

from ..files import Source
from .errors import Problem
from .layer import Layer, normalised

__all__ = ["damaged_scales"]

# A codebook holds weights, and the others of these are positive by their making.
_POSITIVE = ("weight_scale", "weight_scale_2", "input_scale")


def damaged_scales(source: Source, layer: Layer) -> Problem | None:
    """Says which tensor beside the layer's weight is broken, None where all are sound."""
    beside = {suffix: source.read(key) for suffix, key in layer.keys.items() if suffix != "weight"}
    for suffix, tensor in normalised(beside, layer).items():
        values = tensor.float()
        if not bool(torch.isfinite(values).all()):
            found = "NaN or infinite"
        elif suffix in _POSITIVE and bool((values < 0).any()):
            found = "negative"
        else:
            continue
        message = (
            f"its {suffix} holds {found} numbers, and nothing in the file tells what they were. Get the file again, or "
            "quantize the unquantized model anew"
        )
        return Problem(layer.name, "damaged", message)
    return None
