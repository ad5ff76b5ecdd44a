"""What travels along a workflow's links: MODEL, CLIP, VAE, CONDITIONING. Nodes pass them on and never change them."""

from __future__ import annotations

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
    """A diffusion model ready to sample. ``dtype`` is the dtype of the computation, not of the weights."""

    file: str
    module: torch.nn.Module
    architecture: Architecture
    latent: LatentFormat
    sampling: FlowSampling
    device: torch.device
    dtype: torch.dtype

    def with_sampling(self, **changes: Any) -> Model:
        return replace(self, sampling=replace(self.sampling, **changes))

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
        if mask is not None:
            mask = _repeat(mask, batch).to(self.device)
        # The transformer's timestep is the card's, whatever a ModelSampling node did to the sigma table's multiplier.
        timesteps = (sigma * self.architecture.sampling.multiplier).float()
        output = self.module(x.to(self.dtype), timesteps, context, attention_mask=mask)
        return self.sampling.denoised(sigma, output.float(), x)


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
