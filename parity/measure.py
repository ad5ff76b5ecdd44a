"""How far two tensors are apart."""

from __future__ import annotations

import math

import torch

__all__ = ["cosine", "max_abs_error", "non_finite", "relative_error"]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64; 0 for two empty or all-zero tensors."""
    value, reference = value.double().flatten(), reference.double().flatten()
    difference, norm = float((value - reference).norm()), float(reference.norm())
    if norm == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / norm


def cosine(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Cosine of the angle between the two, flattened, in float64; 1 for two all-zero tensors."""
    value, reference = value.double().flatten(), reference.double().flatten()
    norms = float(value.norm()) * float(reference.norm())
    if norms == 0.0:
        return 1.0 if torch.equal(value, reference) else 0.0
    return float(value @ reference) / norms


def max_abs_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference of two elements."""
    if value.numel() == 0:
        return 0.0
    return float((value.double() - reference.double()).abs().max())


def non_finite(value: torch.Tensor) -> int:
    """How many elements are infinite or not a number."""
    return int((~value.isfinite()).sum()) if value.is_floating_point() else 0
