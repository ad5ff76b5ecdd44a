"""One quantized layer in normal form, and how to get its tensors and its float weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..files import Source
from ..files.dtypes import torch_dtype
from .banks import dequantize_bank
from .errors import Problem, QuantError
from .formats import FORMATS, Recipe
from .kitchen import dequantize_matrix

__all__ = ["Layer", "canonical_tensors", "dequantize_rows", "dequantize_tensors", "normalised"]


@dataclass(frozen=True)
class Layer:
    """How the weight of one layer is stored, whatever dialect the file speaks."""

    name: str
    recipe: Recipe
    # The logical [N, K] or [E, N, K].
    shape: tuple[int, ...]
    # Canonical suffixes ("weight", "weight_scale", "input_scale", ...) -> the file's keys.
    keys: Mapping[str, str]
    # "comfy_quant", "header", "legacy", "scales" (dtype and scales alone) or "cast" (plain float8, no scale).
    dialect: str = "comfy_quant"
    # False: the format pads (nvfp4, mxfp8), the file does not say by how much, and `shape` is the padded one.
    exact: bool = True
    # What was settled by evidence, and what `repair` would change.
    notes: tuple[str, ...] = ()
    # Keys that only carried notes (markers).
    leftovers: tuple[str, ...] = field(default=(), repr=False)

    @property
    def experts(self) -> int | None:
        return self.shape[0] if len(self.shape) == 3 and self.dialect != "cast" else None

    def marker(self) -> dict[str, Any]:
        return self.recipe.marker(self.experts)

    def storage_shape(self) -> tuple[int, ...]:
        return FORMATS[self.recipe.format].entries(self.shape, self.recipe)["weight"][1]


def _as_dtype(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` in the safetensors type ``name``: bytes are reinterpreted, floats converted."""
    dtype = torch_dtype(name)
    if tensor.dtype == dtype:
        return tensor
    return tensor.view(dtype) if tensor.dtype in (torch.uint8, torch.int8) and dtype.itemsize == 1 else tensor.to(dtype)


def normalised(tensors: Mapping[str, torch.Tensor], layer: Layer) -> dict[str, torch.Tensor]:
    """The tensors of a layer, by canonical suffix, as ComfyUI's loader wants them; its marker is left out.

    A float8 layer with a scale per row keeps it, for that dequantizes right everywhere. A legacy input scale of one is
    dropped, as ComfyUI's own conversion of such files does.
    """
    wanted = FORMATS[layer.recipe.format].entries(layer.shape, layer.recipe)
    result: dict[str, torch.Tensor] = {}
    for suffix, tensor in tensors.items():
        if suffix in wanted:
            dtype, shape = wanted[suffix]
            tensor = _as_dtype(tensor, dtype)
            tensor = tensor.reshape(shape) if tensor.numel() == math.prod(shape) else tensor
        elif suffix == "input_scale":
            tensor = tensor.float().reshape(()) if tensor.numel() == 1 else tensor.float()
            if layer.dialect == "legacy" and bool((tensor == 1.0).all()):
                continue
        result[suffix] = tensor
    return result


def canonical_tensors(source: Source, layer: Layer) -> dict[str, torch.Tensor]:
    """Reads a layer in the form that `normalised` describes."""
    return normalised({suffix: source.read(key) for suffix, key in layer.keys.items()}, layer)


def dequantize_rows(
    source: Source, layer: Layer, start: int, stop: int, dtype: torch.dtype, *, expert: int | None = None
) -> torch.Tensor:
    """Rows ``start:stop`` (of expert ``expert``) as floats of ``dtype``, reading nothing else of the weight.

    Formats with tiled block scales need ``start`` to be a multiple of 128.
    """
    fmt = FORMATS[layer.recipe.format]
    stored = source.info(layer.keys["weight"]).shape
    rows_stored = stored[-2]
    base = (expert or 0) * rows_stored
    pieces: dict[str, torch.Tensor] = {}
    for suffix, key in layer.keys.items():
        info = source.info(key)
        if suffix in ("input_scale", "pre_quant_scale"):
            continue
        if suffix == "weight" or (suffix == "weight_s_rel"):
            pieces[suffix] = _row_slice(source, key, base + start, base + min(stop, rows_stored))
        elif suffix == "weight_scale" and fmt.padding > 1:
            per = info.shape[-2] * (expert or 0)
            pieces[suffix] = _row_slice(source, key, per + start, per + min(-(-stop // 128) * 128, info.shape[-2]))
        else:
            pieces[suffix] = _side_slice(source.read(key), suffix, layer, start, stop, expert)
    if layer.dialect == "cast":
        return pieces["weight"].to(dtype)
    pieces = {suffix: _as_dtype(tensor, _dtype_of(layer, suffix, tensor)) for suffix, tensor in pieces.items()}
    return dequantize_matrix(pieces, layer.recipe, dtype)[: stop - start, : layer.shape[-1]]


def _dtype_of(layer: Layer, suffix: str, tensor: torch.Tensor) -> str:
    entries = FORMATS[layer.recipe.format].entries(layer.shape, layer.recipe)
    from ..files.dtypes import name_of

    return entries[suffix][0] if suffix in entries else name_of(tensor.dtype)


def _row_slice(source: Source, key: str, start: int, stop: int) -> torch.Tensor:
    """Rows of a 2-D tensor, or of a bank seen as one tall matrix."""
    info = source.info(key)
    columns = info.shape[-1]
    itemsize = info.nbytes // max(info.numel, 1)
    raw = source.read_bytes(key, start * columns * itemsize, stop * columns * itemsize)
    return raw.view(torch_dtype(info.dtype)).reshape(stop - start, columns)


def _side_slice(
    tensor: torch.Tensor, suffix: str, layer: Layer, start: int, stop: int, expert: int | None
) -> torch.Tensor:
    """The part of a small side tensor (scales per row, per expert, codebook) that belongs to the rows."""
    experts = layer.experts
    if suffix == "weight_codebook":
        return tensor
    if experts is not None:
        if tensor.numel() == experts:
            return tensor.reshape(-1)[expert]
        if tensor.numel() > 1:
            tensor = tensor.reshape(experts, -1)[expert]
    if tensor.numel() == 1 and layer.shape[-2] != 1:
        return tensor.reshape(())
    tensor = tensor.reshape(-1)[start:stop]
    per_row_column = layer.recipe.format in ("int8_tensorwise", "float8_e4m3fn", "float8_e5m2")
    return tensor.reshape(-1, 1) if per_row_column else tensor


def dequantize_tensors(
    tensors: Mapping[str, torch.Tensor], recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The float weight of ``shape`` ([N, K] or [E, N, K]) from canonical tensors held in memory."""
    if len(shape) == 2:
        return dequantize_matrix(tensors, recipe, dtype)[: shape[0], : shape[1]]
    return dequantize_bank(tensors, recipe, shape, dtype)


def refuse(path: str, problems: list[Problem]) -> None:
    """Raises QuantError when there are any problems."""
    if problems:
        raise QuantError.of(path, problems)
