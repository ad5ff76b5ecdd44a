"""Codes with less error of the layer's output than rounding each weight by itself, in the same storage.

What is minimised is the expected square of the output's error, a quadratic form of the weights' error in the second
moment of the layer's inputs: the identity where nothing is known of them, else the diagonal of each channel's power.
Two ways:

* search: of several scales (per row for int8 and w4a4, per block of 16 for nvfp4, per weight for float8) the one with
  the least error;
* feedback (GPTQ, Frantar et al. 2022): columns are rounded one after the other, and each one's error is taken out of
  those that come after it, as far as their inputs go together. A diagonal H that is rotated by ConvRot is no longer
  diagonal within a group, and there it helps; without statistics, or without a rotation, there is nothing to feed back.

All arithmetic is fp32. A row (block) keeps the plain way's codes where nothing was found that is better.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from .formats import Recipe
from .kernels import e2m1_codes, packed_high_first, packed_low_first, tiled
from .kitchen import quantize_matrix
from .rotation import hadamard

__all__ = ["ROUNDING", "Rounding", "best_stretch", "improves"]

# How weights become codes: each one by itself, or as a `Rounding` does it.
ROUNDING = ("plain", "feedback")
# Scales as parts of the plain one, the likely ones first: a time budget may end the search.
_ROW_PARTS = {
    127: (0.98, 0.96, 0.94, 0.9, 0.86),
    7: (0.8, 0.75, 0.85, 0.7, 0.9, 0.65, 0.95, 0.6, 0.775, 0.825, 0.725, 0.875, 0.675, 0.925),
}
# Steps of the block scale's float8 code; half again as large a scale (4 steps) moves the largest weight from 6 to 4.
_BLOCK_STEPS = (-1, 4, 1, 3, -2, 5, 2, -3, 6, -4)
_STRETCHES = tuple(2.0 ** (step / 8) for step in range(8))
_DAMPING = 0.01
_FEEDBACK_BLOCK = 32


def improves(recipe: Recipe) -> bool:
    """Whether there is a better way than the plain one for this format."""
    return recipe.format in ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "convrot_w4a4", "nvfp4")


@dataclass(frozen=True)
class Rounding:
    """``seconds``: how long the search may take per million weights, None = to its end (only then the result is the
    same on every machine). Raises ValueError for a negative time."""

    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds >= 0:  # nan too
            raise ValueError(f"{self.seconds} seconds of rounding: a number of at least 0 was expected")

    def codes(
        self, weight: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None, power: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """``weight`` [N, K] as canonical tensors; ``scale`` of the whole tensor where the format has one; ``power`` [K]
        mean square of the input channels."""
        end = None if self.seconds is None else time.monotonic() + self.seconds * weight.numel() / 1e6
        weight = weight.float()
        if recipe.format == "nvfp4":
            return _nvfp4(weight, scale, power, end)
        if recipe.format in ("int8_tensorwise", "convrot_w4a4") and scale is None:
            return _by_rows(weight, recipe, power, end)
        return quantize_matrix(weight, recipe, scale=scale)


def best_stretch(weight: torch.Tensor, recipe: Recipe, scale: torch.Tensor, power: torch.Tensor | None) -> float:
    """By what a float8 scale is to be multiplied for the least error; ``weight`` [N, K]: some rows are enough."""
    weight = weight.float()
    weights = torch.ones(weight.shape[1]) if power is None else power.to(weight.device)

    def error(stretch: float) -> float:
        stretched = scale * stretch
        codes = quantize_matrix(weight, recipe, scale=stretched)["weight"]
        return float(((codes.float() * stretched - weight).square() * weights).sum())

    return min(_STRETCHES, key=error)


def _until(candidates: Iterable, end: float | None) -> Iterator:
    for candidate in candidates:
        if end is not None and time.monotonic() >= end:
            return
        yield candidate


def _by_rows(
    weight: torch.Tensor, recipe: Recipe, power: torch.Tensor | None, end: float | None
) -> dict[str, torch.Tensor]:
    limit = 127 if recipe.format == "int8_tensorwise" else 7
    group = recipe.convrot_groupsize
    moments = None
    if group:
        matrix = hadamard(group).to(weight.device)
        weight = (weight.view(-1, group) @ matrix).view(weight.shape)
        if power is not None:
            moments = matrix * power.to(weight.device).view(-1, 1, group) @ matrix  # [K / G, G, G]
    importance = torch.ones(weight.shape[1], device=weight.device)
    if power is not None and not group:
        importance = power.to(weight.device)
    plain = (weight.abs().amax(1, keepdim=True) / limit).clamp(min=1e-30 if limit == 127 else 1e-10)
    scale, least = plain, _row_error(weight, plain, limit, importance)
    for part in _until(_ROW_PARTS[limit], end):
        candidate = plain * part
        error = _row_error(weight, candidate, limit, importance)
        scale = torch.where(error < least, candidate, scale)
        least = torch.minimum(error, least)
    codes = _row_codes(weight, scale, limit)
    if moments is not None and (end is None or time.monotonic() < end):
        fed = _fed_back(weight, scale, limit, moments)
        better = _moment_error(weight, fed, scale, moments) < _moment_error(weight, codes, scale, moments)
        codes = torch.where(better, fed, codes)
    codes = codes.to(torch.int8)
    if limit == 127:
        return {"weight": codes, "weight_scale": scale}
    return {"weight": packed_low_first(codes), "weight_scale": scale.view(-1)}


def _row_codes(weight: torch.Tensor, scale: torch.Tensor, limit: int) -> torch.Tensor:
    return (weight / scale).round_().clamp_(-limit, limit)


def _row_error(weight: torch.Tensor, scale: torch.Tensor, limit: int, importance: torch.Tensor) -> torch.Tensor:
    return ((_row_codes(weight, scale, limit).mul_(scale) - weight).square_() @ importance).unsqueeze(1)


def _moment_error(
    weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, moments: torch.Tensor
) -> torch.Tensor:
    """[N, 1]: each row's error E, as E H E."""
    error = (weight - codes * scale).view(weight.shape[0], *moments.shape[:2]).transpose(0, 1)
    return ((error @ moments) * error).sum((0, 2)).unsqueeze(1)


def _fed_back(weight: torch.Tensor, scale: torch.Tensor, limit: int, moments: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] of the rotated weight; every group of columns has its own second moments [G, G]."""
    groups, size = moments.shape[:2]
    mean = moments.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float32).tiny).view(-1, 1, 1)
    damped = moments / mean + _DAMPING * torch.eye(size, device=weight.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped.double()))
    upper = torch.linalg.cholesky(inverse).mT.float()  # inverse = upper.T @ upper
    rest = weight.view(weight.shape[0], groups, size).transpose(0, 1).contiguous()  # [K / G, N, G]
    codes = torch.empty_like(rest)
    for start in range(0, size, _FEEDBACK_BLOCK):
        stop = min(start + _FEEDBACK_BLOCK, size)
        block, errors = rest[:, :, start:stop].clone(), torch.empty_like(rest[:, :, start:stop])
        for column in range(stop - start):
            at = start + column
            wanted = block[:, :, column]
            code = (wanted / scale.view(1, -1)).round_().clamp_(-limit, limit)
            error = (wanted - code * scale.view(1, -1)) / upper[:, at, at].view(-1, 1)
            codes[:, :, at], errors[:, :, column] = code, error
            block[:, :, column + 1 :] -= error.unsqueeze(2) * upper[:, at, at + 1 : stop].unsqueeze(1)
        rest[:, :, stop:] -= errors @ upper[:, start:stop, stop:]
    return codes.transpose(0, 1).reshape(weight.shape)


def _nvfp4(
    weight: torch.Tensor, scale: torch.Tensor, power: torch.Tensor | None, end: float | None
) -> dict[str, torch.Tensor]:
    rows, columns = (-(-size // 16) * 16 for size in weight.shape)
    padded = torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))
    blocks = padded.view(rows, -1, 16)
    importance = torch.ones(columns, device=weight.device)
    if power is not None:
        importance[: power.numel()] = power.to(weight.device)
    importance = importance.view(1, -1, 16)
    largest = torch.finfo(torch.float8_e4m3fn).max
    base = (blocks.abs().amax(-1) / 6.0 / scale).clamp_(max=largest).to(torch.float8_e4m3fn).view(torch.uint8)
    chosen, least = base, _block_error(blocks, base, scale, importance)
    for step in _until(_BLOCK_STEPS, end):
        # Positive float8 numbers order like their codes; 1 is the smallest above zero, 126 is 448.
        candidate = torch.where(base > 0, (base.to(torch.int16) + step).clamp_(1, 126).to(torch.uint8), base)
        error = _block_error(blocks, candidate, scale, importance)
        chosen = torch.where(error < least, candidate, chosen)
        least = torch.minimum(error, least)
    codes = e2m1_codes(_over(blocks, chosen, scale).view(-1))
    return {
        "weight": packed_high_first(codes).view(rows, columns // 2),
        "weight_scale": tiled(chosen.view(torch.float8_e4m3fn)),
        "weight_scale_2": scale,
    }


def _over(blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The blocks divided by what their scale's float8 code and the tensor's scale mean; zeros where that is zero."""
    total = (codes.view(torch.float8_e4m3fn).float() * scale).unsqueeze(-1)
    return torch.where(total == 0, 0.0, blocks / torch.where(total == 0, 1.0, total))


def _block_error(
    blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, importance: torch.Tensor
) -> torch.Tensor:
    total = (codes.view(torch.float8_e4m3fn).float() * scale).unsqueeze(-1)
    level = e2m1_codes(_over(blocks, codes, scale).view(-1)).view(blocks.shape)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=blocks.device)
    signed = torch.cat((values, -values))
    return ((signed[level.int()] * total - blocks).square_() * importance).sum(-1)
