"""Cuts and joins quantized weights along their output dimension (qkv, gate and up) without touching a code, and cuts
them along their inputs between groups.

Exact: the pieces dequantize to the rows of the whole, bit for bit. Rotations and groups run along the input dimension,
so rows are independent; what rows share (a scale of the whole tensor, a codebook) is copied, or must agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .formats import FORMATS, Recipe, round_up

__all__ = ["QuantizedWeight", "fuse", "input_unit", "split", "split_inputs"]

_BLOCKS = {"nvfp4": 16, "mxfp8": 32}
_SHARED = ("weight_scale_2", "weight_codebook", "input_scale", "pre_quant_scale")


@dataclass(frozen=True)
class QuantizedWeight:
    """Canonical tensors (suffix -> tensor) of a weight of logical ``shape`` [N, K]."""

    tensors: dict[str, torch.Tensor]
    recipe: Recipe
    shape: tuple[int, int]


def split(weight: QuantizedWeight, sizes: Sequence[int]) -> list[QuantizedWeight]:
    """Cut into pieces of ``sizes`` output features. Raises ValueError when they don't add up."""
    if len(weight.shape) != 2 or sum(sizes) != weight.shape[0] or min(sizes, default=0) < 1:
        raise ValueError(f"can't cut a weight of shape {list(weight.shape)} into rows of {list(sizes)}")
    pieces, start = [], 0
    for size in sizes:
        pieces.append(_rows(weight, start, start + size))
        start += size
    return pieces


def _rows(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    shape = (stop - start, weight.shape[1])
    padding = FORMATS[weight.recipe.format].padding
    tensors: dict[str, torch.Tensor] = {}
    for suffix, tensor in weight.tensors.items():
        if suffix in _SHARED or tensor.numel() == 1:
            tensors[suffix] = tensor
        elif suffix == "weight_scale" and padding > 1:
            grid = _grid(tensor, weight.shape, weight.recipe)[start:stop]
            tensors[suffix] = _tiled(grid, shape, weight.recipe, tensor.dtype)
        else:
            tensors[suffix] = _padded_rows(tensor[start:stop], round_up(shape[0], padding))
    recipe = weight.recipe
    if recipe.format == "int8_tensorwise" and recipe.row_scales:
        tensors["weight_scale"] = tensors["weight_scale"].reshape(-1, 1)
    return QuantizedWeight({suffix: tensor.contiguous() for suffix, tensor in tensors.items()}, recipe, shape)


def split_inputs(weight: QuantizedWeight, parts: int, layer: str = "") -> list[QuantizedWeight]:
    """Cut into ``parts`` equal pieces of input features, as devices that share a layer want them: the product is the
    sum of the pieces' products.

    Groups, blocks and rotations run along the inputs. Raises ValueError, with the name of ``layer``, for a cut that
    would go through one; such a layer has to be split by its outputs, or quantized after splitting.
    """
    columns = weight.shape[1]
    unit = input_unit(weight.recipe)
    if parts < 1 or columns % parts or columns // parts % unit:
        raise ValueError(
            f"layer {layer!r}: {columns} input features can't be cut into {parts} parts: {weight.recipe} is stored in "
            f"groups of {unit}. Split it by its outputs, or quantize the parts"
        )
    width = columns // parts
    return [_columns(weight, start, start + width) for start in range(0, columns, width)]


def input_unit(recipe: Recipe) -> int:
    """Input features that belong together."""
    own = {"convrot_w4a4": 64, "asym_w4a8_int8": 16}.get(recipe.format, 1)
    return math.lcm(own, _BLOCKS.get(recipe.format, 1), recipe.convrot_groupsize or 1, recipe.group_size or 1)


def _columns(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    recipe, shape = weight.recipe, (weight.shape[0], stop - start)
    fmt = FORMATS[recipe.format]
    tensors: dict[str, torch.Tensor] = {}
    for suffix, tensor in weight.tensors.items():
        if suffix == "weight":
            tensor = tensor[:, start // fmt.packing : stop // fmt.packing]
        elif suffix == "weight_s_rel":
            tensor = tensor[:, start // recipe.group_size : stop // recipe.group_size]
        elif suffix == "pre_quant_scale" and tensor.numel() > 1:
            tensor = tensor.reshape(-1)[start:stop]
        elif suffix == "weight_scale" and recipe.format in _BLOCKS:
            block = _BLOCKS[recipe.format]
            grid = _grid(tensor, weight.shape, recipe)[:, start // block : stop // block]
            tensor = _tiled(grid, shape, recipe, tensor.dtype)
        tensors[suffix] = tensor.contiguous()
    return QuantizedWeight(tensors, recipe, shape)


def fuse(pieces: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join along the output dimension; all pieces in one recipe and of one width.

    float8 and int8 weights whose scales differ get one scale per row (exact; float8 then needs full precision
    products). Raises ValueError where joining can't be exact: other codebooks, other nvfp4 tensor scales, other scales
    of the input.
    """
    first = pieces[0]
    for piece in pieces[1:]:
        if _comparable(piece.recipe) != _comparable(first.recipe) or piece.shape[1] != first.shape[1]:
            raise ValueError(
                f"can't join {piece.recipe} [.., {piece.shape[1]}] with {first.recipe} [.., {first.shape[1]}]: "
                "all pieces need one format and width"
            )
        if set(piece.tensors) != set(first.tensors):
            raise ValueError(f"can't join: one piece has {sorted(first.tensors)}, another {sorted(piece.tensors)}")
    shape = (sum(piece.shape[0] for piece in pieces), first.shape[1])
    tensors: dict[str, torch.Tensor] = {}
    recipe = first.recipe
    for suffix in first.tensors:
        parts = [piece.tensors[suffix] for piece in pieces]
        if suffix in _SHARED:
            if any(not torch.equal(part, parts[0]) for part in parts[1:]):
                raise ValueError(f"can't join exactly: the pieces have different {suffix}; quantize the joined weight")
            tensors[suffix] = parts[0]
        elif suffix == "weight_scale":
            tensors[suffix], recipe = _joined_scales(pieces, shape)
        else:
            rows = [part[: piece.shape[0]] for part, piece in zip(parts, pieces, strict=True)]
            tensors[suffix] = _padded_rows(_cat(rows), round_up(shape[0], FORMATS[recipe.format].padding))
    return QuantizedWeight(tensors, recipe, shape)


def _comparable(recipe: Recipe) -> Recipe:
    return replace(recipe, row_scales=False, full_precision=False)


def _joined_scales(pieces: Sequence[QuantizedWeight], shape: tuple[int, int]) -> tuple[torch.Tensor, Recipe]:
    recipe = pieces[0].recipe
    scales = [piece.tensors["weight_scale"] for piece in pieces]
    if recipe.format in _BLOCKS:
        grids = [_grid(scale, piece.shape, recipe) for scale, piece in zip(scales, pieces, strict=True)]
        return _tiled(_cat(grids), shape, recipe, scales[0].dtype), recipe
    if recipe.format == "convrot_w4a4":
        return torch.cat(scales), recipe
    recipe = replace(recipe, full_precision=any(piece.recipe.full_precision for piece in pieces))
    shared = not recipe.row_scales and all(scale.numel() == 1 for scale in scales)
    if shared and all(torch.equal(scale, scales[0]) for scale in scales[1:]):
        return scales[0], recipe
    rows = [scale.reshape(-1, 1).expand(piece.shape[0], 1) for scale, piece in zip(scales, pieces, strict=True)]
    if recipe.format == "int8_tensorwise":
        return torch.cat(rows), replace(recipe, row_scales=True)
    return torch.cat(rows), replace(recipe, full_precision=True)


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.cat has no kernel for some float8 types: bytes are joined instead."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat(list(parts))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _padded_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Zero rows up to ``rows``; codes of zero are zero bytes in every format that pads."""
    if tensor.shape[0] >= rows:
        return tensor[:rows]
    zeros = torch.zeros(rows - tensor.shape[0], *tensor.shape[1:], dtype=torch.uint8).to(tensor.device)
    return _cat([tensor, zeros.view(tensor.dtype)])


def _grid(scale: torch.Tensor, shape: tuple[int, int], recipe: Recipe) -> torch.Tensor:
    """Tiled block scales as plain bytes, one row of them per row of the weight."""
    # cuBLAS has tiles of 128 x 4, in which rows that are 32 apart lie together.
    block = _BLOCKS[recipe.format]
    rows, columns = scale.shape
    tiles = scale.contiguous().view(torch.uint8).reshape(rows // 128, columns // 4, 32, 4, 4)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)
    return plain[: shape[0], : round_up(shape[1], block) // block]


def _tiled(grid: torch.Tensor, shape: tuple[int, int], recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    rows, columns = FORMATS[recipe.format].entries(shape, recipe)["weight_scale"][1]
    plain = torch.zeros(rows, columns, dtype=torch.uint8, device=grid.device)
    plain[: grid.shape[0], : grid.shape[1]] = grid
    tiles = plain.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns).view(dtype)
