"""Flow model sampling, with the numbers that ComfyUI uses.

A noisy latent is a mixture of noise and the clean latent, and sigma is the part of the noise, from one down to zero.
"""
# ComfyUI's ModelSamplingDiscreteFlow with CONST: x = sigma * noise_scale * noise + (1 - sigma) * x0.

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..supported_models import Sampling

__all__ = ["FlowSampling", "per_item"]

TABLE_SIZE = 1000


def per_item(sigma: torch.Tensor, ndim: int) -> torch.Tensor:
    """sigma: [] or [B], shaped to multiply [B, ...] of ``ndim`` dimensions."""
    return sigma.view(()) if sigma.nelement() == 1 else sigma.view(-1, *(1,) * (ndim - 1))


def shifted(shift: float, t):
    """The static time shift of Stable Diffusion 3: shift * t / (1 + (shift - 1) * t)."""
    return t if shift == 1.0 else shift * t / (1 + (shift - 1) * t)


@dataclass(frozen=True)
class FlowSampling:
    """How a model is sampled; a node that changes the shift makes a changed copy.

    prediction: "velocity" (noise - data), "-velocity" or "x0". multiplier scales the steps of the sigma table, as in
    ComfyUI; the transformer's own timestep is not affected by it (see ``Model.denoise``). card: whose this is, for the
    publisher's own schedule.
    """

    prediction: str = "velocity"
    shift: float = 1.0
    multiplier: float = 1.0
    noise_scale: float = 1.0
    x0_sigma_floor: float = 0.0
    card: Sampling | None = None

    @classmethod
    def of_card(cls, card: Sampling) -> FlowSampling:
        return cls(card.prediction, card.shift, card.multiplier, card.noise_scale, card.x0_sigma_floor, card)

    @cached_property
    def sigmas(self) -> torch.Tensor:
        """A rising table in float32, from which the schedules pick."""
        return self.sigma(torch.arange(1, TABLE_SIZE + 1) / TABLE_SIZE * self.multiplier)

    @property
    def sigma_min(self) -> torch.Tensor:
        return self.sigmas[0]

    @property
    def sigma_max(self) -> torch.Tensor:
        return self.sigmas[-1]

    def timestep(self, sigma):
        return sigma * self.multiplier

    def sigma(self, timestep):
        return shifted(self.shift, timestep / self.multiplier)

    def percent_to_sigma(self, percent: float) -> float:
        """Sigma after that part of the way: 0 = pure noise, 1 = done."""
        if percent <= 0:
            return 1.0
        return 0.0 if percent >= 1 else shifted(self.shift, 1.0 - percent)

    def noisy(self, sigma: torch.Tensor, noise: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
        """x0 with noise of strength sigma. noise, x0: [B, C, ...]."""
        sigma = per_item(sigma, noise.ndim)
        return sigma * (self.noise_scale * noise) + (1.0 - sigma) * x0

    def without_scale(self, sigma: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What a sampler that stopped at ``sigma`` hands on: x / (1 - sigma)."""
        return x / (1.0 - per_item(sigma, x.ndim))

    def denoised(self, sigma: torch.Tensor, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x0 from what the model said about x at sigma [B]."""
        sigma = per_item(sigma, x.ndim)
        if self.prediction == "velocity":
            return x - output * sigma
        if self.prediction == "-velocity":
            return x + output * sigma
        if self.prediction == "x0":
            # The reference divides by max(sigma, floor) on the way to a velocity: below it, a step stops short of x0.
            if not self.x0_sigma_floor:
                return output
            step = sigma / sigma.clamp_min(self.x0_sigma_floor)
            return torch.where(step < 1, x + (output - x) * step, output)
        raise ValueError(f"unknown prediction {self.prediction!r}; known: velocity, -velocity, x0")
