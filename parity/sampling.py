"""Whole runs of both networks with the same noise and sigmas, so that what is left to differ is the network.

Afterwards each runs with its own schedule: if only these runs end apart, the schedule is the cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..supported_models import Architecture
from .measure import relative_error
from .port import Inputs, Port
from .schedule import timestep_of
from .stages import LOW_PRECISION, PLAIN

__all__ = ["SamplingResult", "compare_sampling", "euler"]


@dataclass(frozen=True)
class SamplingResult:
    """steps: relative error of the latent after each step, same noise and sigmas; own: that of the two results when
    the reference takes its pipeline's sigmas, None when these are not known; allowed: for ``steps``."""

    sigmas: tuple[float, ...]
    steps: tuple[float, ...]
    own: float | None
    allowed: float

    @property
    def differs(self) -> bool:
        return not all(step <= self.allowed for step in self.steps)

    @property
    def schedule_differs(self) -> bool:
        return self.own is not None and not self.own <= self.allowed


def euler(
    network: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    card: Architecture,
    noise: torch.Tensor,
    sigmas: Sequence[float],
) -> list[torch.Tensor]:
    """The latents after each step. The network is given a latent and its time, and predicts what the card says; noise
    has a strength of one, and sigmas fall."""
    # network(x, timesteps [B]); noise [B, C, H, W].
    sampling, latents = card.sampling, []
    x = noise * sampling.noise_scale * sigmas[0]
    for sigma, following in itertools.pairwise(sigmas):
        time = timestep_of(card, sigma, *x.shape[-2:])
        output = network(x, torch.full((x.shape[0],), time, dtype=torch.float32)).float()
        if sampling.prediction == "x0":
            output = (x - output) / max(sigma, sampling.x0_sigma_floor)
        elif sampling.prediction == "-velocity":
            output = -output
        x = x + (following - sigma) * output
        latents.append(x)
    return latents


@torch.no_grad()
def compare_sampling(
    port: Port,
    card: Architecture,
    ours: torch.nn.Module,
    reference: torch.nn.Module,
    inputs: Inputs,
    noise: torch.Tensor,
    sigmas: Sequence[float],
    *,
    own_sigmas: Sequence[float] | None = None,
) -> SamplingResult:
    """Both networks with the conditions of ``inputs``. own_sigmas: the reference pipeline's schedule."""

    dtype = inputs[port.latent].dtype

    def network(run: Callable[..., torch.Tensor], module: torch.nn.Module):
        return lambda x, time: run(module, {**inputs, port.latent: x.to(dtype), port.time: time})

    mine = euler(network(port.run_ours, ours), card, noise, sigmas)
    theirs = euler(network(port.run_reference, reference), card, noise, sigmas)
    steps = tuple(relative_error(a, b) for a, b in zip(mine, theirs, strict=True))
    own = None
    if own_sigmas is not None:
        own = relative_error(mine[-1], euler(network(port.run_reference, reference), card, noise, own_sigmas)[-1])
    allowed = PLAIN * len(steps) if dtype == torch.float32 else LOW_PRECISION
    return SamplingResult(tuple(sigmas), steps, own, allowed)
