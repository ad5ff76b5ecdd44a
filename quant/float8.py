"""Weights times a factor as float8 codes, from the bits of bfloat16 numbers.

torch turns numbers into float8 one by one. Here sixteen at a time are rounded in integer arithmetic, to the same codes.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["float8_codes"]

# Bits of bfloat16's mantissa.
_MANTISSA = 7
# Bits of the mantissa, the exponent's bias, and up to where everything is rounded to the largest number, not beyond.
_SHORT = {torch.float8_e4m3fn: (3, 7, 460.0), torch.float8_e5m2: (2, 15, 61000.0)}
_SMALLEST_NORMAL = sys.float_info.min
# Numbers that are looked at together for one that has to be rounded once more.
_BLOCK = 256


def float8_codes(weight: torch.Tensor, factor: torch.Tensor, peak: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The contiguous ``weight`` times ``factor``, both of one float type, rounded to that type, clamped to what
    ``dtype`` holds, and rounded to it. ``peak``: the weight's largest magnitude, in the weight's type.

    The factor is divided by a power of two, so that the exponents of a float8 number and of the product get the same
    field. A code then is the product's upper bits, rounded half to even, with the sign moved. Numbers that are
    subnormal in float8 are subnormal in the product's type too, and have been rounded there before: that can tell
    where they come to lie halfway between two codes, and these are multiplied and rounded again the plain way.
    """
    if weight.dtype != torch.bfloat16:
        return _plain(weight, factor, dtype)  # float32 in integers would take longer
    kept, bias, beyond = _SHORT[dtype]
    shift, folded = _MANTISSA - kept, float(factor) * 2.0 ** (bias - 127)
    inside = 2.0**-126 <= folded < 2.0**100 and float(peak) * float(factor) < beyond
    if not inside or _loses_subnormals():
        return _plain(weight, factor, dtype)
    flat = weight.view(-1)
    bits = (flat * folded).view(torch.int16)
    half, last = 1 << (shift - 1), 1
    sign = 1 << (shift + 7)  # the shift below spreads the sign over this bit and brings it to the code's first bit
    codes = bits >> shift
    codes.bitwise_and_(sign | last).add_(bits).add_(half - 1).bitwise_right_shift_(shift)
    result = codes.to(torch.uint8)
    whole = flat.numel() // _BLOCK * _BLOCK
    doubt = bits[:whole].bitwise_and_(0xFF << _MANTISSA | (2 * half - 1)).bitwise_xor_(half).view(-1, _BLOCK).amin(1)
    again = (doubt == 0).nonzero().view(-1)
    if again.numel():
        blocks = flat[:whole].view(-1, _BLOCK)[again]
        result[:whole].view(-1, _BLOCK)[again] = _plain(blocks, factor, dtype).view(torch.uint8)
    if whole < flat.numel():
        result[whole:] = _plain(flat[whole:], factor, dtype).view(torch.uint8)
    return result.view(dtype).view(weight.shape)


def _plain(weight: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (weight * factor).clamp_(-limit, limit).to(dtype)


def _loses_subnormals() -> bool:
    """Whether this thread's processor has been told to take subnormal numbers for zero (Python's own too)."""
    return _SMALLEST_NORMAL * 0.5 == 0.0
