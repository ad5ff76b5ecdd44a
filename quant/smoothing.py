"""Scales between a layer's input and its nvfp4 weight, so that channels with large activations do not drown others.

ComfyUI multiplies each channel of the input by such a scale before it is quantized; the weight's columns are divided by
it. All scales here are powers of two: neither side is rounded by them.
"""
# ComfyUI's name for them is pre_quant_scale; the idea is that of AWQ and SmoothQuant.

from __future__ import annotations

import torch

from .calibration import Inputs
from .formats import FORMATS, Recipe
from .kitchen import dequantize_matrix, quantize_matrix, tensor_scale
from .measure import relative_error

__all__ = ["input_scale", "pre_quant_scale"]

# How much of an activation's size moves into the weight; 0.5 shares it evenly.
_STRENGTHS = (0.25, 0.5, 0.75, 1.0)
_TOKENS = 64
_LARGEST_EXPONENT = 16


def input_scale(recipe: Recipe, amax: torch.Tensor) -> torch.Tensor | None:
    """The scale by which ComfyUI quantizes a layer's input, from the largest magnitude of that input; both are scalars.

    None for formats that scale each input by itself.
    """
    limits = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "nvfp4": 448.0 * 6.0}
    if recipe.format not in limits:
        return None
    return (amax.float() / limits[recipe.format]).clamp(min=torch.finfo(torch.float32).tiny)


def pre_quant_scale(weight: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """[K] fp32, powers of two, for ``weight`` [N, K] (some of its rows are enough) in nvfp4.

    Of several strengths the one with the least error of the layer's output on inputs drawn with the channels' power;
    all ones where none is better than that.
    """
    weight = weight.float()
    tokens = torch.randn(_TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    tokens = torch.minimum(torch.maximum(tokens * inputs.power.sqrt(), -inputs.amax), inputs.amax)
    plain = torch.ones(weight.shape[1])
    best, least = plain, _output_error(weight, tokens, plain)
    for strength in _STRENGTHS:
        candidate = _balanced(weight, inputs, strength)
        error = _output_error(weight, tokens, candidate)
        if error < least:
            best, least = candidate, error
    return best


def _balanced(weight: torch.Tensor, inputs: Inputs, strength: float) -> torch.Tensor:
    amax, peak = inputs.amax, weight.abs().amax(0)
    usable = (amax > 0) & (peak > 0)
    exponent = (1 - strength) * torch.log2(peak) - strength * torch.log2(amax)
    exponent = torch.where(usable, exponent, 0.0)
    exponent = torch.where(usable, exponent - exponent[usable].median(), 0.0) if bool(usable.any()) else exponent
    return torch.exp2(exponent.round().clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT))


def _output_error(weight: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor) -> float:
    return relative_error(tokens @ weight.t(), _as_nvfp4(tokens * scale) @ _as_nvfp4(weight / scale).t())


def _as_nvfp4(matrix: torch.Tensor) -> torch.Tensor:
    recipe = FORMATS["nvfp4"].default
    tensors = quantize_matrix(matrix, recipe, scale=tensor_scale(recipe, matrix.abs().amax()))
    return dequantize_matrix(tensors, recipe, torch.float32)[: matrix.shape[0], : matrix.shape[1]]
