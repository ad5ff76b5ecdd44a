"""Guidance that keeps every patch's strength, in the engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..ldm.nucleus.sampling import patch_renormalized_guidance
from .objects import Model


def set_patch_renormalized_guidance(model: Model, patch_size: int) -> Model:
    def guided(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
        return patch_renormalized_guidance(cond, uncond, scale, patch_size=patch_size)

    return replace(model, guidance=guided)
