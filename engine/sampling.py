"""From noise to a latent: noise by seed, guidance, masks, and the sampler's loop, in ComfyUI's order and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .calibrate import watched
from .flow import per_item
from .objects import Condition, Model
from .samplers import SAMPLERS, Run

__all__ = ["Guider", "fit_empty_latent", "noise_for", "sample"]


@dataclass(frozen=True)
class Guider:
    """model with its conditions. negative None: no guidance. cfg 1 leaves the negative prompt out."""

    model: Model
    positive: list[Condition]
    negative: list[Condition] | None = None
    cfg: float = 1.0

    def denoised(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """x0 as guided. x: [B, C, ...], sigma: [B]. Each prompt is a call of its own: their lengths may differ."""
        positive = self._mean(self.positive, x, sigma)
        if not self.negative or math.isclose(self.cfg, 1.0):
            return positive
        negative = self._mean(self.negative, x, sigma)
        if self.model.guidance is not None:
            per = per_item(sigma, x.ndim)
            return x - per * self.model.guidance((x - positive) / per, (x - negative) / per, self.cfg)
        return negative + (positive - negative) * self.cfg

    def _mean(self, conditions: list[Condition], x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        results = [self.model.denoised(x, sigma, condition) for condition in conditions]
        return results[0] if len(results) == 1 else torch.stack(results).mean(0)


def noise_for(samples: torch.Tensor, seed: int, batch_index: list[int] | None = None) -> torch.Tensor:
    """Unit noise in the shape of ``samples``: float32, drawn on the CPU whatever runs the model.

    batch_index: which of the pictures of a larger batch these are, so that each keeps its own noise.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if batch_index is None:
        return torch.randn(samples.shape, dtype=torch.float32, generator=generator)
    each = [torch.randn((1, *samples.shape[1:]), generator=generator) for _ in range(max(batch_index) + 1)]
    return torch.cat([each[index] for index in batch_index])


def fit_empty_latent(model: Model, latent: dict[str, Any]) -> torch.Tensor:
    """The samples of ``latent``; an all-zero one takes the channels and the size that the model wants.

    Raises ValueError for a latent with content and the wrong number of channels.
    """
    samples, wanted = latent["samples"], model.latent
    channels = samples.shape[1]
    if torch.count_nonzero(samples):
        if channels != wanted.channels:
            raise ValueError(
                f"the latent has {channels} channels, {model.architecture.title} works on {wanted.channels}: "
                f"it was made with another model's VAE; use {model.architecture.autoencoder}"
            )
        return samples
    height, width = samples.shape[-2:]
    ratio = latent.get("downscale_ratio_spacial")
    if ratio is not None and ratio != wanted.compression:
        height, width = round(height * ratio / wanted.compression), round(width * ratio / wanted.compression)
    return samples.new_zeros(samples.shape[0], wanted.channels, height, width)


def fit_mask(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A noise mask [B, 1, h, w] (or [h, w]) in the latent's shape [B, C, H, W]: 1 = sample here, 0 = keep."""
    mask = mask.reshape(-1, 1, mask.shape[-2], mask.shape[-1]).float()
    mask = torch.nn.functional.interpolate(mask, size=shape[-2:], mode="bilinear")
    mask = mask.repeat(math.ceil(shape[0] / mask.shape[0]), 1, 1, 1)[: shape[0]]
    return mask.expand(shape)


@torch.inference_mode()
def sample(
    guider: Guider,
    noise: torch.Tensor,  # unit noise in the shape of `latent`
    latent: torch.Tensor,  # raw, [B, C, H, W]
    sampler: str,
    sigmas: torch.Tensor,  # [steps + 1]
    *,
    seed: int,  # for noise that the sampler adds
    mask: torch.Tensor | None = None,  # see `fit_mask`
    on_step: Callable[[int, torch.Tensor], None] | None = None,  # called with the step and x0
) -> torch.Tensor:
    """The sampled latent, raw as an autoencoder decodes it, on the CPU in float32. Without sigmas the latent comes back
    as it was."""
    if len(sigmas) == 0:
        return latent
    model, device = guider.model, guider.model.device
    noise, latent = noise.to(device, torch.float32), latent.to(device, torch.float32)
    sigmas = sigmas.to(device)
    if torch.count_nonzero(latent):
        latent = model.latent.into_model(latent)
    flow = model.sampling
    function = guider.denoised
    if mask is not None:
        mask = fit_mask(mask.to(device), latent.shape)
        kept_noise = noise
        if sampler == "ddim":
            kept_noise = noise_for(latent, (seed + 1) % 2**64).to(device)

        def function(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            kept = flow.noisy(per_item(sigma, x.ndim), kept_noise, latent)
            x = x * mask + kept * (1.0 - mask)
            return guider.denoised(x, sigma) * mask + latent * (1.0 - mask)

    x = flow.noisy(sigmas[0], noise, latent)
    with watched(model.file, model.module):
        x = SAMPLERS[sampler](function, x, sigmas, Run(flow, seed, on_step or (lambda step, denoised: None)))
    x = flow.without_scale(sigmas[-1], x)
    return model.latent.from_model(x.float()).cpu()
