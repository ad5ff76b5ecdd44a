"""The bytes of comfy_kitchen faster: matrices in bfloat16 and float32 on a CPU, in operations that torch itself has.

The CPU path of comfy_kitchen is written to be read: it passes over full-width temporaries and boolean masks, which cost
a CPU ten times more than the arithmetic. Here the same roundings are done on the bits of the numbers. Facts used:
magnitudes order like their bits; division by a power of two is exact; the bit pattern of a number, cut behind some of
its mantissa and rounded half to even, is the code of a shorter kind of float.
"""

from __future__ import annotations

import torch

from .float8 import float8_codes
from .formats import Recipe, round_up
from .rotation import rotated

__all__ = ["e2m1_codes", "packed_high_first", "packed_low_first", "peak_of", "quantize_fast", "tiled"]

_BITS = {torch.bfloat16: (torch.int16, 0x7FFF), torch.float32: (torch.int32, 0x7FFFFFFF)}
# Integers of a float's width, and numbers of which a processor's cache holds a copy.
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_NEAR = 1 << 19


def _magnitudes(weight: torch.Tensor) -> torch.Tensor:
    """The bits without the sign. A NaN's are above those of infinity, so the largest of many tells of both."""
    integer, mask = _BITS[weight.dtype]
    return weight.view(integer).bitwise_and(mask)


def peak_of(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitude, without dimensions, in the weight's own float type; NaN or infinite where a weight is.

    Bits order like magnitudes: as numbers with a sign they have the largest positive weight on top, as numbers without
    one the largest negative one. NumPy finds both faster than torch either, and wakes no other threads for it.
    """
    integer = _INTEGERS[weight.dtype.itemsize]
    bits = weight.contiguous().view(-1).view(integer).numpy()
    without_sign, largest = bits.view(f"u{bits.itemsize}"), 0
    for start in range(0, len(bits), _NEAR):
        positive, negative = bits[start : start + _NEAR].max(), without_sign[start : start + _NEAR].max()
        largest = max(largest, int(positive), int(negative) & torch.iinfo(integer).max)
    return torch.tensor(largest, dtype=integer).view(weight.dtype)


def _row_scale(weight: torch.Tensor) -> torch.Tensor:
    return _magnitudes(weight).amax(1, keepdim=True).view(weight.dtype)


def _int8(weight: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    if recipe.convrot_groupsize:
        weight = rotated(weight, recipe.convrot_groupsize)
    if recipe.row_scales:
        scale = (_row_scale(weight).float() / 127.0).clamp(min=1e-30)
    elif scale is None:
        scale = (peak_of(weight).float() / 127.0).clamp(min=1e-30)
    divisor = scale.to(weight.dtype)
    codes = torch.div(weight, torch.where(divisor == 0, torch.finfo(weight.dtype).tiny, divisor)).round_()
    if recipe.row_scales:  # 127.5 at most, which rounds to 128: integers are clamped in a sixth of the time
        return {"weight": codes.to(torch.int16).clamp_(max=127).to(torch.int8), "weight_scale": scale}
    return {"weight": codes.clamp_(-128.0, 127.0).to(torch.int8), "weight_scale": scale}


def _w4a4(weight: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    weight = rotated(weight, recipe.convrot_groupsize)
    scale = _row_scale(weight).clamp(min=1e-10) / 7
    codes = torch.div(weight, scale).round_().to(torch.int8)  # 7 at most: the quotient errs by less than a hundredth
    return {"weight": packed_low_first(codes), "weight_scale": scale.view(-1).float()}


def packed_low_first(codes: torch.Tensor) -> torch.Tensor:
    """int8 -8..7 [N, K] -> int8 [N, K / 2], the even column in the low nibble."""
    pairs = codes.view(torch.int16)  # even column in the low byte
    packed = pairs.bitwise_and(0x0F)
    return packed.bitwise_or_((pairs >> 4).bitwise_and_(0xF0)).to(torch.int8)


def packed_high_first(codes: torch.Tensor) -> torch.Tensor:
    """uint8 0..15 [K] -> uint8 [K / 2], the even column in the high nibble."""
    pairs = codes.view(torch.int16)
    return pairs.bitwise_left_shift(4).bitwise_or_(pairs >> 8).to(torch.uint8)


def _float8(weight: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    dtype = torch.float8_e4m3fn if recipe.format == "float8_e4m3fn" else torch.float8_e5m2
    peak = peak_of(weight)
    if scale is None:
        scale = (peak / torch.finfo(dtype).max).float()
    return {"weight": float8_codes(weight, (1.0 / scale).to(weight.dtype), peak, dtype), "weight_scale": scale}


def _padded(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    rows, columns = (round_up(size, multiple) for size in weight.shape)
    if (rows, columns) == tuple(weight.shape):
        return weight
    return torch.nn.functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))


def _own(wide: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``wide`` where it is a copy, to be written over; new memory where it is the weight itself."""
    return wide if weight.dtype != torch.float32 else torch.empty_like(wide)


def _block_peaks(weight: torch.Tensor, block: int) -> torch.Tensor:
    return _magnitudes(weight).view(weight.shape[0], -1, block).amax(-1).view(weight.dtype)


def _mxfp8(weight: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    weight = _padded(weight, 32)
    peaks = _block_peaks(weight, 32)
    needed = (peaks.float() / 448.0).clamp_(min=2.0**-127)
    exponent = (torch.ceil(torch.log2(needed)).to(torch.int32) + 127).clamp_(0, 254).to(torch.uint8)
    empty = peaks == 0
    divisor = torch.where(empty, 1.0, (exponent.to(torch.int32) << 23).view(torch.float32))  # 2^-127 counts as 0
    scaled = weight.float().view(*peaks.shape, 32)
    scaled = torch.div(scaled, divisor.unsqueeze(-1), out=_own(scaled, weight)).clamp_(-448.0, 448.0)
    if bool(empty.any()):
        scaled[empty] = 0.0  # no negative zeros
    blocks = tiled(exponent.masked_fill_(empty, 0)).view(torch.float8_e8m0fnu)
    return {"weight": scaled.view(weight.shape).to(torch.float8_e4m3fn), "weight_scale": blocks}


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Block scales [R, C], one byte each, as ComfyUI stores them: zeros up to multiples of 128 rows and 4 columns, then
    tiles of 128 by 4, in which row r is at place r % 32 and r // 32 chooses one of 4 groups of columns."""
    rows, columns = (round_up(size, multiple) for size, multiple in zip(scales.shape, (128, 4), strict=True))
    whole = scales.view(torch.uint8)
    if whole.shape != (rows, columns):
        whole = torch.nn.functional.pad(whole, (0, columns - whole.shape[1], 0, rows - whole.shape[0]))
    tiles = whole.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns).view(scales.dtype)


def _nvfp4(weight: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    if scale is None:
        scale = (peak_of(weight) / (448.0 * 6.0)).float()
    weight = _padded(weight, 16)
    blocks = (_block_peaks(weight, 16).float() / 6.0 / scale).clamp_(max=448.0).to(torch.float8_e4m3fn)
    total = scale * blocks.float()
    empty = total == 0
    scaled = weight.float().view(*total.shape, 16)
    scaled = torch.div(scaled, torch.where(empty, 1.0, total).unsqueeze(-1), out=_own(scaled, weight))
    if bool(empty.any()):
        scaled[empty] = 0.0
    packed = packed_high_first(e2m1_codes(scaled.view(-1)))
    return {
        "weight": packed.view(weight.shape[0], -1),
        "weight_scale": tiled(blocks),
        "weight_scale_2": scale,
    }


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> codes 0..15 of 0 .5 1 1.5 2 3 4 6, ties to the even code, sign in bit 3, as uint8. Overwrites ``values``.

    Below 2 the codes are steps of 0.5, above they are the exponent and first mantissa bit; from 1 to 2 they are both.
    """
    bits = values.view(torch.int32)
    sign = bits.bitwise_right_shift(28).bitwise_and_(8)
    bits.bitwise_and_(0x7FFFFFFF)
    # The gap between fp32 numbers is 0.5 from 2^22 on: the sum is rounded to steps of 0.5, its last bits count them.
    steps = values.add(2.0**22).view(torch.int32).sub_(0x4A800000).clamp_(max=3)
    odd = bits.bitwise_right_shift(22).bitwise_and_(1)
    codes = bits.add_(odd).add_(0x1FFFFF).bitwise_right_shift_(22).clamp_(255, 259)
    return codes.add_(steps).sub_(255).bitwise_or_(sign).to(torch.uint8)


KERNELS = {
    "float8_e4m3fn": _float8,
    "float8_e5m2": _float8,
    "int8_tensorwise": _int8,
    "convrot_w4a4": _w4a4,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


def quantize_fast(
    weight: torch.Tensor, recipe: Recipe, scale: torch.Tensor | None = None
) -> dict[str, torch.Tensor] | None:
    """The canonical tensors of ``weight`` [N, K], or None where this module has no way of its own."""
    kernel = KERNELS.get(recipe.format)
    if (
        kernel is None
        or weight.device.type != "cpu"
        or weight.dtype not in (torch.bfloat16, torch.float32)
        or not weight.numel()
    ):
        return None
    return kernel(weight.contiguous(), recipe, scale)
