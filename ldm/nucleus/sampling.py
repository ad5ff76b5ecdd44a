"""Nucleus-Image's guidance."""
# Source: diffusers' NucleusMoEImagePipeline 0.42.1.

from __future__ import annotations

import torch
import torch.nn.functional as F

PATCH_SIZE = 2


def patch_norm(x: torch.Tensor, patch_size: int) -> torch.Tensor:
    """The norm of every patch over all channels, at each of its pixels: [B, C, ..., H, W] -> [B, 1, ..., H, W]."""
    height, width = x.shape[-2:]
    energy = F.pad(x.square().sum(dim=1, keepdim=True), (0, -width % patch_size, 0, -height % patch_size))
    patches = energy.unflatten(-1, (-1, patch_size)).unflatten(-3, (-1, patch_size)).sum(dim=(-3, -1))
    norm = patches.sqrt().repeat_interleave(patch_size, dim=-2).repeat_interleave(patch_size, dim=-1)
    return norm[..., :height, :width]


def patch_renormalized_guidance(
    cond: torch.Tensor, uncond: torch.Tensor, scale: float, *, patch_size: int = PATCH_SIZE
) -> torch.Tensor:
    """Classifier-free guidance that turns each patch's prediction without making it longer than ``cond``'s.

    cond, uncond: [B, C, ..., H, W], velocities or any common multiple of them; patches are the transformer's tokens.
    """
    guided = uncond + scale * (cond - uncond)
    shortest = torch.finfo(guided.dtype).tiny  # where nothing is left, nothing is what comes out
    return guided * (patch_norm(cond, patch_size) / patch_norm(guided, patch_size).clamp_min(shortest))
