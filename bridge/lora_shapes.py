"""Shapes of the weights that a LoRA changes, as ComfyUI will add them: said only where they are certain.

ComfyUI multiplies an adapter out when sampling starts, reshapes the product to the weight, and on failure writes one
line per layer and goes on without it. So only a product with another number of values than the weight is sure to fail.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch

Shape = tuple[int, ...]
_PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def misfit(patch: Any, target: Any, models: Iterable[torch.nn.Module]) -> tuple[Shape, Shape] | None:
    """(shape that the patch changes, shape of the weight) when ComfyUI is sure to leave this patch out, else None.

    patch: as ``comfy.lora.load_lora`` returns it; target: the key it is kept under, a name or a name with a slice.
    """
    changes = _changed(patch)
    if changes is None or not isinstance(target, str):
        return None
    weight = next((shape for model in models if (shape := weight_shape(model, target)) is not None), None)
    return None if weight is None or math.prod(changes) == math.prod(weight) else (changes, weight)


def weight_shape(model: torch.nn.Module, key: str) -> Shape | None:
    """The shape as the layer computes with it, however it is stored; None where that is not certain."""
    path, _, name = key.rpartition(".")
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return None
    weight = _held(layer, name)
    if type(weight) in (torch.Tensor, torch.nn.Parameter) and weight.dtype in _PLAIN:
        return tuple(weight.shape)
    # Quantized, in a wrapper of another pack, or not loaded yet: the layer itself knows.
    sizes = [getattr(layer, "out_features", None), getattr(layer, "in_features", None)]
    if name != "weight" or not all(isinstance(size, int) for size in sizes):
        return None
    experts = getattr(layer, "num_experts", None)
    return (*sizes,) if experts is None else (experts, *sizes)


def _held(layer: torch.nn.Module, name: str) -> Any:
    try:
        return operator.attrgetter(name)(layer)
    except AttributeError:
        return None


def _changed(patch: Any) -> Shape | None:
    """The shape that an adapter multiplies out to; None for kinds that are not known or that resize the weight."""
    if isinstance(patch, tuple):
        plain = len(patch) == 2 and patch[0] == "diff" and len(patch[1]) == 1
        return tuple(patch[1][0].shape) if plain else None
    weights = getattr(patch, "weights", None)
    shape_of = {"lora": _lora, "loha": _loha, "lokr": _lokr, "glora": _glora}.get(getattr(patch, "name", None))
    if shape_of is None or not isinstance(weights, tuple):
        return None
    try:
        return shape_of(*weights)
    except (TypeError, AttributeError, IndexError):  # kept differently than in the versions known here
        return None


def _lora(up, down, alpha, mid, dora_scale, reshape) -> Shape | None:
    if mid is not None or reshape is not None:
        return None
    return (up.shape[0], math.prod(down.shape[1:]))


def _loha(first_up, first_down, alpha, second_up, second_down, first_core, second_core, dora_scale) -> Shape | None:
    shape = (first_up.shape[0], first_down.shape[1])
    alike = shape == (second_up.shape[0], second_down.shape[1])
    return shape if alike and first_core is None and second_core is None else None


def _lokr(first, second, alpha, first_up, first_down, second_up, second_down, core, dora_scale) -> Shape | None:
    if core is not None:
        return None
    first = first.shape if first is not None else (first_up.shape[0], first_down.shape[1])
    second = second.shape if second is not None else (second_up.shape[0], second_down.shape[1])
    return (first[0] * second[0], math.prod(first[1:]) * math.prod(second[1:]))


def _glora(a1, a2, b1, b2, alpha, dora_scale) -> Shape | None:
    """Two layouts exist; where the factors fit both, nothing is certain."""
    old = b2.shape[1] == b1.shape[0] == a1.shape[0] == a2.shape[1]
    new = b2.shape[0] == b1.shape[1] == a1.shape[1] == a2.shape[0]
    if old == new:
        return None
    rows, columns = (b2, b1) if old else (b1, b2)
    return (rows.shape[0], math.prod(columns.shape[1:]))
