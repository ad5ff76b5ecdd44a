"""What travels along a workflow's links: models, encoders, conditions. Nodes pass them on and never change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..latent_formats import LatentFormat
from ..supported_models import Architecture
from .flow import FlowSampling

__all__ = ["VAE", "Condition", "Model"]

# One entry of a CONDITIONING: states [1, L, D] and what belongs to them ("attention_mask": [1, L], ...), as in ComfyUI.
Condition = tuple[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """A diffusion model ready to sample. ``dtype`` is the dtype of the computation, not of the weights.

    sampling_set: a node has set the sampling, so the latent's size changes nothing any more; guidance: f(cond, uncond,
    scale) -> guided, on velocities, in place of classifier-free guidance.
    """

    file: str
    module: torch.nn.Module
    architecture: Architecture
    latent: LatentFormat
    sampling: FlowSampling
    device: torch.device
    dtype: torch.dtype
    sampling_set: bool = False
    guidance: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] | None = None

    def with_sampling(self, **changes: Any) -> Model:
        return replace(self, sampling=replace(self.sampling, **changes), sampling_set=True)

    def for_latent(self, samples: torch.Tensor) -> Model:
        """This model with the shift of the samples' size [..., H, W], where it follows the size."""
        card = self.architecture.sampling
        if self.sampling_set or card.shift_of_latent is None:
            return self
        return replace(self, sampling=replace(self.sampling, shift=card.shift_for(*samples.shape[-2:])))

    @property
    def patch_size(self) -> int:
        """Latent pixels per token, each way."""
        return getattr(self.module, "patch_size", 1)

    def denoised(self, x: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        """x0 [B, C, H, W] for x in the model's own scale at sigma [B]."""
        states, extra = condition
        batch = x.shape[0]
        context = _repeat(states, batch).to(self.device, self.dtype)
        mask = extra.get("attention_mask")
        if mask is not None and mask.all():
            mask = None  # hides nothing, and fast attention kernels take none
        elif mask is not None:
            mask = _repeat(mask, batch).to(self.device)
        told = {
            name: torch.tensor([extra[name]], device=self.device).expand(batch, -1)
            for name in self.architecture.conditions
            if extra.get(name) is not None
        }
        scale = self.architecture.sampling.guidance
        if scale is not None:
            scale = extra.get("guidance", scale) * self.module.guidance_embeds_scale
            told["guidance"] = torch.full((batch,), scale, device=self.device, dtype=self.dtype)
        output = self.module(x.to(self.dtype), self._timesteps(sigma), context, attention_mask=mask, **told)
        return self.sampling.denoised(sigma, output.float(), x)

    def _timesteps(self, sigma: torch.Tensor) -> torch.Tensor:
        """What the reference transformer is given, whatever multiplier a node gave the sigma table."""
        card = self.architecture.sampling
        if card.timestep_before_shift:
            shift = self.sampling.shift
            sigma = sigma / (shift - (shift - 1) * sigma)
        return (sigma * card.multiplier).float()


def _repeat(value: torch.Tensor, batch: int) -> torch.Tensor:
    """[b, ...] for ``batch`` pictures; prompts fewer than pictures start over."""
    if value.shape[0] == batch:
        return value
    return value.repeat(-(-batch // value.shape[0]), *(1,) * (value.ndim - 1))[:batch]


class VAE(Protocol):
    """Pictures [B, H, W, 3] from 0 to 1, latents [B, C, h, w] raw."""

    name: str
    channels: int
    compression: int

    def encode(self, pictures: torch.Tensor) -> torch.Tensor: ...

    def decode(self, latents: torch.Tensor) -> torch.Tensor: ...
