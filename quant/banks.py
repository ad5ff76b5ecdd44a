"""Products with a bank of expert weights, and the float weights of a quantized bank: all experts at once.

A bank is worked through in pieces of many experts, so that what is unpacked or widened on the way stays small beside
the bank itself.
"""
# A published bank is 352 million weights: 0.7 GB in bfloat16, 1.4 GB in float32.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from .formats import Recipe
from .kitchen import dequantize_matrix

__all__ = ["dequantize_bank", "multiply", "multiply_quantized"]

# Weights that are unpacked at a time: 256 MB in float32.
PIECE = 1 << 26
# Tiles of block scales: 128 rows (4 times 32) by 4 columns.
_TILE_ROWS, _TILE_COLUMNS = 128, 4


def _slow_on_a_cpu() -> frozenset[torch.dtype]:
    """What this processor has no units for. torch then multiplies value by value, 5 to 40 times slower than float32."""
    checks = {
        torch.bfloat16: getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None),
        torch.float16: getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None),
    }
    return frozenset(dtype for dtype, check in checks.items() if check is not None and not check())


SLOW_ON_A_CPU = _slow_on_a_cpu() if torch.backends.mkldnn.is_available() else frozenset()


def _pieces(shape: tuple[int, ...], size: int) -> Iterator[slice]:
    """Experts 0..E of a bank [E, N, K], at most about ``size`` weights at a time."""
    count = max(1, size // math.prod(shape[1:]))
    return (slice(start, start + count) for start in range(0, shape[0], count))


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [E, tokens, in], each expert its own tokens; weight: [E, out, in] in any float type, in any memory order.
    Returns [E, tokens, out] in x's type."""
    dtype = torch.float32 if x.device.type == "cpu" and x.dtype in SLOW_ON_A_CPU else x.dtype
    if weight.dtype == dtype:
        return torch.bmm(x.to(dtype), weight.to(x.device).transpose(1, 2)).to(x.dtype)
    pieces = _pieces(tuple(weight.shape), PIECE // 4)  # small enough to stay in a processor's nearer memory
    outputs = [torch.bmm(x[some].to(dtype), weight[some].to(x.device, dtype).transpose(1, 2)) for some in pieces]
    return torch.cat(outputs).to(x.dtype)


def multiply_quantized(
    x: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    recipe: Recipe,
    shape: tuple[int, int, int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`multiply` with a bank of ``shape`` [E, out, in] that is unpacked to ``dtype`` (None = x's) on the way."""
    outputs = []
    for some in _pieces(shape, PIECE):
        own, count = _experts(tensors, some), len(range(shape[0])[some])
        outputs.append(multiply(x[some], _unpacked(own, recipe, (count, *shape[1:]), dtype or x.dtype).to(x.dtype)))
    return torch.cat(outputs)


def dequantize_bank(
    tensors: Mapping[str, torch.Tensor], recipe: Recipe, shape: tuple[int, int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weights [E, N, K] of ``shape`` in ``dtype``, the same bits as expert by expert. ``tensors``: canonical names,
    each with a leading E where it is not one number for all."""
    out = torch.empty(shape, dtype=dtype, device=tensors["weight"].device)
    for some in _pieces(shape, PIECE):
        piece = out[some]
        piece.copy_(_unpacked(_experts(tensors, some), recipe, tuple(piece.shape), dtype))
    return out


def _experts(tensors: Mapping[str, torch.Tensor], some: slice) -> dict[str, torch.Tensor]:
    shared = "weight_codebook"
    return {
        suffix: tensor if suffix == shared or tensor.ndim == 0 else tensor[some]
        for suffix, tensor in tensors.items()
        if suffix.startswith("weight")
    }


def _unpacked(
    tensors: Mapping[str, torch.Tensor], recipe: Recipe, shape: tuple[int, int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The experts below each other are one tall matrix, which comfy_kitchen unpacks."""
    experts, rows, columns = shape
    stored = tensors["weight"]
    tall = {suffix: tensor if tensor.ndim < 2 else tensor.flatten(0, 1) for suffix, tensor in tensors.items()}
    if recipe.format == "nvfp4":
        weights = _nvfp4(tensors, tall, recipe, dtype)
    else:
        if recipe.format == "mxfp8":
            tall["weight_scale"] = _tall_tiles(tensors["weight_scale"].view(torch.uint8), stored.shape[1]).view(
                tensors["weight_scale"].dtype
            )
        elif recipe.format != "asym_w4a8_int8" and tensors["weight_scale"].numel() > 1:
            scale = tensors["weight_scale"].reshape(experts, -1).expand(-1, stored.shape[1]).flatten()
            tall["weight_scale"] = scale if recipe.format == "convrot_w4a4" else scale.unsqueeze(1)
        elif recipe.format == "asym_w4a8_int8":
            tall["weight_s_channel"] = tensors["weight_s_channel"].flatten()
        weights = dequantize_matrix(tall, recipe, dtype)
    return weights.view(experts, stored.shape[1], -1)[:, :rows, :columns]


def _nvfp4(
    tensors: Mapping[str, torch.Tensor], tall: dict[str, torch.Tensor], recipe: Recipe, dtype: torch.dtype
) -> torch.Tensor:
    """Codes at scale 1, then each expert's own scale times its blocks' (comfy_kitchen takes one scale per matrix)."""
    blocks, stored = tensors["weight_scale"], tall["weight"]
    width = 2 * stored.shape[1] // 16
    ones = torch.ones(-(-len(stored) // _TILE_ROWS) * _TILE_ROWS, blocks.shape[-1], device=stored.device)
    plain = {"weight": stored, "weight_scale": ones.to(blocks.dtype), "weight_scale_2": ones.new_ones(())}
    codes = dequantize_matrix(plain, recipe, dtype)
    scales = _untiled(blocks.view(torch.uint8))[:, : tensors["weight"].shape[1], :width].contiguous()
    total = tensors["weight_scale_2"].to(dtype).reshape(-1, 1, 1) * scales.view(blocks.dtype).to(dtype)
    return codes.view(-1, 16) * total.view(-1, 1)


def _untiled(scales: torch.Tensor) -> torch.Tensor:
    """Block scales [E, R, C] out of their tiles, in which row r is at place r % 32, r // 32 % 4: [E, R, C] by rows."""
    experts, rows, columns = scales.shape
    tiles = scales.view(experts, rows // _TILE_ROWS, columns // _TILE_COLUMNS, 32, 4, _TILE_COLUMNS)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows, columns)


def _tall_tiles(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """The tiled block scales of E matrices of ``rows`` rows each as those of the matrices below each other."""
    if rows % _TILE_ROWS == 0:
        return scales.flatten(0, 1)
    below = _untiled(scales)[:, :rows].flatten(0, 1)
    below = F.pad(below, (0, 0, 0, -len(below) % _TILE_ROWS))
    tiles = below.view(-1, 4, 32, below.shape[1] // _TILE_COLUMNS, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(below.shape)
