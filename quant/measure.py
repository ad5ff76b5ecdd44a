"""How much of a weight survives its format: relative error and signal-to-noise ratio."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .formats import Recipe
from .kitchen import dequantize_matrix, quantize_matrix, tensor_scale
from .stream import RowRun

__all__ = ["relative_error", "sampled_error", "sqnr", "weighted_error", "weighted_sqnr"]

_SAMPLE_ROWS = 256


def relative_error(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Root-mean-square of the difference over that of the reference; 0 for two all-zero tensors."""
    reference, approximation = reference.float(), approximation.float()
    signal = float(reference.square().sum())
    noise = float((reference - approximation).square().sum())
    if signal == 0.0:
        return 0.0 if noise == 0.0 else math.inf
    return math.sqrt(noise / signal)


def sqnr(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal to quantization noise ratio in decibels; higher is better, infinite when exact."""
    error = relative_error(reference, approximation)
    return math.inf if error == 0.0 else -20.0 * math.log10(error)


def weighted_error(original: torch.Tensor, quantized: torch.Tensor, channel_power: torch.Tensor) -> float:
    """Relative error of a layer's OUTPUT when its weight [N, K] is ``quantized`` instead of ``original``.

    ``channel_power`` [K]: mean square of each input channel. For inputs whose channels are uncorrelated this is the
    expected root-mean-square of the outputs' difference over that of the outputs. 0 for two outputs without power.
    """
    if original.shape != quantized.shape or channel_power.shape != original.shape[-1:]:
        raise ValueError(
            f"weights {tuple(original.shape)} and {tuple(quantized.shape)} with the power of "
            f"{tuple(channel_power.shape)} channels: both weights need one shape [N, K], the power [K]"
        )
    gain = channel_power.float().clamp(min=0).sqrt()
    return relative_error(original.float() * gain, quantized.float() * gain)


def weighted_sqnr(original: torch.Tensor, quantized: torch.Tensor, channel_power: torch.Tensor) -> float:
    """`weighted_error` in decibels, as `sqnr` is of `relative_error`; higher is better, infinite when exact."""
    error = weighted_error(original, quantized, channel_power)
    return math.inf if error == 0.0 else -20.0 * math.log10(error)


def quantization_error(weight: torch.Tensor, recipe: Recipe) -> float:
    """Relative error of storing ``weight`` [N, K] so."""
    tensors = quantize_matrix(weight, recipe, scale=tensor_scale(recipe, weight.abs().amax()))
    restored = dequantize_matrix(tensors, recipe, torch.float32)[: weight.shape[0], : weight.shape[1]]
    return relative_error(weight, restored)


def sampled_error(
    load: Callable[[RowRun], torch.Tensor], shape: tuple[int, ...], recipe: Recipe, dtype: torch.dtype
) -> float:
    """Relative error measured on up to 256 rows in two runs (first and middle rows) of the first matrix.

    A scale of the whole tensor is taken from these rows: an outlier elsewhere is not seen.
    """
    rows = shape[-2]
    half = _SAMPLE_ROWS // 2
    starts = [0] if rows <= _SAMPLE_ROWS else [0, rows // 2 // half * half]
    length = min(rows, _SAMPLE_ROWS if len(starts) == 1 else half)
    weight = torch.cat([load(RowRun(start, min(start + length, rows))) for start in starts]).to(dtype)
    return quantization_error(weight, recipe)
