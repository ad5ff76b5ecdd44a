"""ConvRot: groups of a weight's columns times a Hadamard matrix, with comfy_kitchen's bytes in less time.

comfy_kitchen is not imported: tests compare the matrix and the products with it.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["hadamard", "rotated", "rotated_at_once"]

_SIGNLESS = 0x7FFF


@functools.lru_cache(maxsize=16)
def hadamard(size: int) -> torch.Tensor:
    """The matrix [size, size] in fp32 for a power of four: Kronecker powers of the 4 x 4 one whose antidiagonal is
    negative, over the root of the size (its entries are plus and minus a power of two)."""
    small = (1 - 2 * torch.eye(4).flip(0)) / 2
    result = torch.ones(1, 1)
    while len(result) < size:
        result = torch.kron(result, small)
    return result


def rotated_at_once(weight: torch.Tensor, group: int) -> torch.Tensor:
    """``weight`` [N, K] in one product over all of a group, in the weight's dtype: comfy_kitchen's own on a CPU, in the
    same shapes, on which the order of the sums depends."""
    matrix = hadamard(group).T.to(weight.dtype)
    return torch.matmul(weight.reshape(weight.shape[0], -1, group), matrix).reshape(weight.shape)


@functools.lru_cache(maxsize=8)
def _factors(group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two Hadamard matrices whose Kronecker product is that of ``group``: two short products instead of a long one."""
    power = group.bit_length() // 2  # group = 4 ** power
    inner = 4 ** ((power + 1) // 2)
    outer = group // inner
    return hadamard(outer), hadamard(inner)


def rotated(weight: torch.Tensor, group: int) -> torch.Tensor:
    """A weight of any number of rows, each group of columns times the Hadamard matrix, rounded once to its own dtype.

    In bfloat16 the sums are taken in float32, as comfy_kitchen takes them, but in another order. Where that could tell
    in the rounding, the group is computed once more with the very product that comfy_kitchen uses.
    """
    if weight.dtype == torch.float32:
        return rotated_at_once(weight, group)
    outer, inner = _factors(group)
    wide = weight.float().view(-1, inner.shape[0])
    half = torch.mm(wide, inner).view(-1, outer.shape[0], inner.shape[0])
    sums = torch.matmul(outer, half, out=wide.view(half.shape)).view(-1, group)
    slack = _slack(weight.view(-1, group), sums)
    result = torch.add(sums, slack, out=half.view(sums.shape)).to(torch.bfloat16)
    other = sums.sub_(slack).to(torch.bfloat16)
    # Words of 32 bits and their extremes: torch compares numbers one by one, which takes longer than the product.
    differs = other.view(torch.int32).bitwise_xor_(result.view(torch.int32))
    doubtful = (differs.amax(1) != differs.amin(1)).logical_or_(differs[:, 0] != 0).nonzero().view(-1)
    if doubtful.numel():
        result[doubtful] = rotated_at_once(weight.view(-1, group)[doubtful], group)
    return result.view(weight.shape)


def _slack(groups: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """How far apart the sums of each row can come out when they are added up in another order, as a column.

    Zero where they are exact: where their terms are multiples of one unit, and they stay below 2^24 units. The unit is
    7 bits below the exponent of the row's smallest magnitude. As for partial sums: the matrix keeps lengths, so where
    one of them is large some result is, times the root of the group's size that it was divided by. In the other rows
    it is what errors of float32 reach: 2^-23 of the largest weight, five times what was seen; where the weights follow
    a column of the matrix, so that partial sums only grow, more of them are rounded and by more.
    """
    bits = groups.view(torch.int16).bitwise_and(_SIGNLESS)
    highest = bits.amax(1).view(torch.bfloat16).float()
    lowest = bits.sub_(1).bitwise_and_(_SIGNLESS).amin(1)  # zeros have no bits: they become the largest
    # Not aminmax: along a dimension it is fifteen times slower than the two together.
    peaks = torch.maximum(torch.maximum(sums.amax(1), -sums.amin(1)), highest)
    root = groups.shape[1].bit_length() // 2
    exponents = peaks.view(torch.int32) >> 23
    inexact = exponents - (lowest >> 7) > 24 - 1 - 7 - root
    return torch.where(inexact, peaks * (peaks / highest) * 2.0**-23, 0.0).unsqueeze(1)
