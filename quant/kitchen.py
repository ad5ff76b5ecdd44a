"""The one way to comfy_kitchen's formats: 2-D matrices to and from their stored form.

comfy_kitchen is imported on first use; without it, or with one that lacks a layout, everything else still works and
the call raises ImportError that says what to install.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from .formats import FORMATS, Recipe
from .kernels import quantize_fast

__all__ = [
    "as_quantized_tensor",
    "dequantize_matrix",
    "has_tensor_scale",
    "layout_of",
    "quantize_matrix",
    "require",
    "scale_of",
    "tensor_scale",
]

_E4M3_MAX = 448.0
_E2M1_MAX = 6.0


def layout_of(name: str) -> Any:
    """comfy_kitchen's layout class for a format. Raises ImportError when it is missing or a stub."""
    fmt = FORMATS[name]
    try:
        from comfy_kitchen import tensor as kitchen
    except ImportError as error:
        raise ImportError(f"the format {name} needs comfy-kitchen (pip install comfy-kitchen): {error}") from error
    layout = vars(kitchen).get(fmt.layout)
    if layout is None or not callable(getattr(layout, "quantize", None)):
        raise ImportError(
            f"the installed comfy-kitchen has no {fmt.layout}, which the format {name} needs; "
            "install a newer one (pip install -U comfy-kitchen)"
        )
    return layout


def require(name: str) -> None:
    """Raises ImportError as `layout_of` does. An installed comfy_kitchen that nobody has imported yet is looked at from
    outside: importing it takes as long as quantizing a gigabyte, and `kernels` can do without it."""
    if "comfy_kitchen" not in sys.modules and (spec := find_spec("comfy_kitchen")) is not None:
        for folder in spec.submodule_search_locations or ():
            path = os.path.join(folder, "tensor", "__init__.py")
            if os.path.isfile(path):
                with open(path, encoding="utf-8") as file:
                    if FORMATS[name].layout in file.read():
                        return
    layout_of(name)


def tensor_scale(recipe: Recipe, amax: torch.Tensor) -> torch.Tensor | None:
    """The scale of the whole tensor from its largest magnitude; both are scalars, the scale one in float32.

    None where the format has no such scale. Arithmetic is that of ComfyUI: formats of whole bytes divide in float32,
    the one of half bytes in the weight's dtype. Never below the smallest normal number, whose inverse is still finite.
    """
    # float8 and int8 divide in fp32, nvfp4 in the weight's dtype, that of `amax`. 0 * inf would be NaN.
    if recipe.format == "nvfp4":
        scale = (amax / (_E4M3_MAX * _E2M1_MAX)).float()
    elif recipe.format == "float8_e4m3fn":
        scale = amax.float() / torch.finfo(torch.float8_e4m3fn).max
    elif recipe.format == "float8_e5m2":
        scale = amax.float() / torch.finfo(torch.float8_e5m2).max
    elif recipe.format == "int8_tensorwise" and not recipe.row_scales:
        return (amax.float() / 127.0).clamp(min=1e-30)
    else:
        return None
    return scale.clamp(min=torch.finfo(torch.float32).tiny)


def has_tensor_scale(recipe: Recipe) -> bool:
    """Whether `tensor_scale` gives one for this recipe."""
    return tensor_scale(recipe, torch.ones(())) is not None


def quantize_matrix(
    weight: torch.Tensor,
    recipe: Recipe,
    *,
    scale: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """``weight`` [N, K] as canonical tensors. ``scale`` and ``codebook`` pin what must be common to several chunks.

    The bytes are comfy_kitchen's; `kernels` computes them where it can.
    """
    wanted = FORMATS[recipe.format].entries(tuple(weight.shape), recipe)
    fast = quantize_fast(weight, recipe, scale)
    if fast is not None:
        return {suffix: fast[suffix].reshape(shape) for suffix, (_, shape) in wanted.items()}
    layout = layout_of(recipe.format)
    keywords: dict[str, Any] = {}
    if recipe.format == "float8_e4m3fn":
        keywords["dtype"] = torch.float8_e4m3fn
    elif recipe.format == "float8_e5m2":
        keywords["dtype"] = torch.float8_e5m2
    elif recipe.format == "int8_tensorwise":
        keywords["per_channel"] = recipe.row_scales
        if recipe.convrot_groupsize:
            keywords.update(convrot=True, convrot_groupsize=recipe.convrot_groupsize)
    elif recipe.format == "convrot_w4a4":
        keywords["convrot_groupsize"] = recipe.convrot_groupsize
    elif recipe.format == "asym_w4a8_int8":
        keywords.update(
            group_size=recipe.group_size,
            convrot_groupsize=recipe.convrot_groupsize,
            codebook=recipe.codebook,
            codebook_tensor=codebook,
        )
    if scale is not None:
        keywords["scale"] = scale
    stored, params = layout.quantize(weight, **keywords)
    suffixes = layout.state_dict_tensors(stored, params)
    tensors = {f"weight{suffix}": tensor for suffix, tensor in suffixes.items()}
    return {suffix: tensors[suffix].reshape(shape) for suffix, (_, shape) in wanted.items()}


def scale_of(tensors: Mapping[str, torch.Tensor], recipe: Recipe) -> torch.Tensor:
    """The tensor that comfy_kitchen calls ``scale`` in this format's parameters."""
    if recipe.format == "nvfp4":
        return tensors["weight_scale_2"]
    if recipe.format == "asym_w4a8_int8":
        return tensors["weight_s_rel"]
    return tensors["weight_scale"]


def _params(tensors: Mapping[str, torch.Tensor], recipe: Recipe, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    layout = layout_of(recipe.format)
    extra: dict[str, Any] = {}
    if recipe.format == "nvfp4":
        extra["block_scale"] = tensors["weight_scale"]
    elif recipe.format == "int8_tensorwise":
        extra["convrot"] = bool(recipe.convrot_groupsize)
        if recipe.convrot_groupsize:
            extra["convrot_groupsize"] = recipe.convrot_groupsize
    elif recipe.format == "convrot_w4a4":
        extra["convrot_groupsize"] = recipe.convrot_groupsize
        if recipe.linear_dtype:
            extra["linear_dtype"] = recipe.linear_dtype
    elif recipe.format == "asym_w4a8_int8":
        extra.update(
            s_channel=tensors["weight_s_channel"],
            codebook=tensors.get("weight_codebook"),
            group_size=recipe.group_size,
            convrot_groupsize=recipe.convrot_groupsize,
        )
    return layout.Params(scale=scale_of(tensors, recipe), orig_dtype=dtype, orig_shape=shape, **extra)


def _stored_columns(tensors: Mapping[str, torch.Tensor], recipe: Recipe) -> int:
    return tensors["weight"].shape[-1] * FORMATS[recipe.format].packing


def dequantize_matrix(tensors: Mapping[str, torch.Tensor], recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    """The stored (padded) matrix in ``dtype``, computed as ComfyUI computes it with that compute dtype."""
    stored = tensors["weight"]
    shape = (stored.shape[0], _stored_columns(tensors, recipe))
    # One scale per row is unknown to comfy_kitchen; one for all is the same product there, on a CPU.
    if recipe.format.startswith("float8") and (tensors["weight_scale"].numel() > 1 or stored.device.type == "cpu"):
        return stored.to(dtype) * tensors["weight_scale"].reshape(-1, 1).to(dtype)
    return layout_of(recipe.format).dequantize(stored.contiguous(), _params(tensors, recipe, shape, dtype))


def as_quantized_tensor(
    tensors: Mapping[str, torch.Tensor], recipe: Recipe, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor of comfy_kitchen with the logical shape of a matrix, whose product runs in the format itself."""
    from comfy_kitchen.tensor import QuantizedTensor

    layout_of(recipe.format)
    return QuantizedTensor(tensors["weight"], FORMATS[recipe.format].layout, _params(tensors, recipe, shape, dtype))
