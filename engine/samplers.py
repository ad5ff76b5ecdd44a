"""Samplers: plain functions of a model, a latent and sigmas. The loop is the algorithm.

The model makes of a noisy latent the clean one, as the model sees it. Each sampler gives the latents of ComfyUI's
sampler of the same name for flow models; sources are named beside each.
"""
# model(x, sigma) -> x0: x [B, C, ...] float32, sigma [B]. ComfyUI from 0.29 on.

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from .flow import FlowSampling
from .uni_pc import uni_pc

__all__ = ["SAMPLERS", "Run", "Sampler"]

Model = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """What a sampler may need besides: the flow, the seed of added noise, and who is told of each step's x0."""

    flow: FlowSampling
    seed: int
    on_step: Callable[[int, torch.Tensor], None] = lambda step, denoised: None


Sampler = Callable[[Model, torch.Tensor, torch.Tensor, Run], torch.Tensor]


def _noise(x: torch.Tensor, run: Run) -> Callable[[], torch.Tensor]:
    """Noise for ancestral steps. On a CPU the initial noise comes from the same generator, hence another seed."""
    generator = torch.Generator(device=x.device).manual_seed((run.seed + (x.device.type == "cpu")) % 2**64)
    return lambda: torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def euler(model: Model, x: torch.Tensor, sigmas: torch.Tensor, run: Run) -> torch.Tensor:
    """Karras et al. (2022), algorithm 2 without churn."""
    batch = x.new_ones(x.shape[0])
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        denoised = model(x, sigma * batch)
        run.on_step(i, denoised)
        x = x + (x - denoised) / sigma * (following - sigma)
    return x


def euler_ancestral(model: Model, x: torch.Tensor, sigmas: torch.Tensor, run: Run) -> torch.Tensor:
    """Euler to a lower sigma, then noise back up; for flows the signal's scale is (1 - sigma)."""
    batch, noise = x.new_ones(x.shape[0]), _noise(x, run)
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        denoised = model(x, sigma * batch)
        run.on_step(i, denoised)
        if following == 0:
            x = denoised
            continue
        down = following * following / sigma
        signal = (1 - following) / (1 - down)
        added = (following**2 - (down * signal) ** 2) ** 0.5
        ratio = down / sigma
        x = signal * (ratio * x + (1 - ratio) * denoised) + noise() * run.flow.noise_scale * added
    return x


def heun(model: Model, x: torch.Tensor, sigmas: torch.Tensor, run: Run) -> torch.Tensor:
    """Karras et al. (2022), algorithm 1 without churn: the slope at both ends of a step, averaged."""
    batch = x.new_ones(x.shape[0])
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        denoised = model(x, sigma * batch)
        run.on_step(i, denoised)
        slope = (x - denoised) / sigma
        ahead = x + slope * (following - sigma)
        if following > 0:
            slope = (slope + (ahead - model(ahead, following * batch)) / following) / 2
        x = x + slope * (following - sigma)
    return x


def dpmpp_2m(model: Model, x: torch.Tensor, sigmas: torch.Tensor, run: Run) -> torch.Tensor:
    """Multistep of second order in the negative logarithm of sigma, as ComfyUI also does for flows."""
    # Source: DPM-Solver++(2M), Lu et al. (2022).
    batch, before, last_h = x.new_ones(x.shape[0]), None, None
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        denoised = model(x, sigma * batch)
        run.on_step(i, denoised)
        h = sigma.log() - following.log()
        estimate = denoised
        if before is not None and following > 0:
            r = last_h / h
            estimate = (1 + 1 / (2 * r)) * denoised - 1 / (2 * r) * before
        x = following / sigma * x - (-h).expm1() * estimate
        before, last_h = denoised, h
    return x


def dpmpp_sde(model: Model, x: torch.Tensor, sigmas: torch.Tensor, run: Run) -> torch.Tensor:
    """DPM-Solver++ (stochastic, two evaluations a step), in half the log signal-to-noise ratio of a flow."""
    if len(sigmas) <= 1:
        return x
    batch, noise = x.new_ones(x.shape[0]), _brownian_noise(x, sigmas, run)
    if sigmas[0] >= 1:  # the ratio is minus infinity at sigma 1
        sigmas = torch.cat((sigmas.new_tensor([run.flow.percent_to_sigma(1e-4)]), sigmas[1:]))
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        denoised = model(x, sigma * batch)
        run.on_step(i, denoised)
        if following == 0:
            x = denoised
            continue
        start, end = -sigma.logit(), -following.logit()
        middle = start + (end - start) / 2
        between = (-middle).sigmoid()
        ahead = _sde_step(x, denoised, sigma, between, start, middle, noise(sigma, between), run)
        estimate = model(ahead, between * batch)
        x = _sde_step(x, estimate, sigma, following, start, end, noise(sigma, following), run)
    return x


def _sde_step(x, denoised, sigma, following, start, end, noise, run: Run) -> torch.Tensor:
    """One ancestral step from half log SNR ``start`` to ``end``; the signal's scale at sigma is sigma * exp(half)."""
    down, up = _ancestral((-start).exp(), (-end).exp())
    h = -down.log() - start
    signal, before = following * end.exp(), sigma * start.exp()
    x = signal / before * (-h).exp() * x - signal * (-h).expm1() * denoised
    return x + signal * noise * run.flow.noise_scale * up


def _ancestral(sigma: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sigma to step down to, noise to add) so that both make ``following``, for variance-exploding sigmas."""
    up = torch.minimum(following, (following**2 * (sigma**2 - following**2) / sigma**2) ** 0.5)
    return (following**2 - up**2) ** 0.5, up


def _brownian_noise(x: torch.Tensor, sigmas: torch.Tensor, run: Run):
    """(from, to) -> unit noise, increments of one Brownian path, so that it does not depend on the steps."""
    try:
        import torchsde
    except ImportError as error:
        raise ImportError(
            "sampler dpmpp_sde draws its noise with torchsde, which is not installed: pip install torchsde"
        ) from error
    low, high = sigmas[sigmas > 0].min().cpu().float(), sigmas.max().cpu().float()
    tree = torchsde.BrownianTree(low, torch.zeros_like(x, device="cpu"), high, entropy=run.seed)

    def noise(sigma: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        # From the lower to the higher sigma as the tree wants it; walked downwards, so the sign turns.
        t0, t1 = following.cpu().float(), sigma.cpu().float()
        with warnings.catch_warnings():
            # It warns of ends that differ from the tree's in the last digit.
            warnings.simplefilter("ignore", UserWarning)
            increment = tree(t0, t1)
        return -increment.to(x) / (t1 - t0).abs().sqrt().to(x)

    return noise


def res_multistep(model: Model, x: torch.Tensor, sigmas: torch.Tensor, run: Run) -> torch.Tensor:
    """The refined exponential solver of second order, with one evaluation a step."""
    # Source: Zhang et al., arXiv 2308.02157.
    batch, before, last_sigma = x.new_ones(x.shape[0]), None, None
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        denoised = model(x, sigma * batch)
        run.on_step(i, denoised)
        if before is None or following == 0:
            x = x + (x - denoised) / sigma * (following - sigma)
        else:
            h = sigma.log() - following.log()
            c2 = (sigma.log() - last_sigma.log()) / h  # negative: the earlier point lies behind
            phi1 = (-h).expm1() / -h
            phi2 = (phi1 - 1) / -h
            b2 = torch.nan_to_num(phi2 / c2, nan=0.0)
            b1 = torch.nan_to_num(phi1 - phi2 / c2, nan=0.0)
            x = (-h).exp() * x + h * (b1 * denoised + b2 * before)
        before, last_sigma = denoised, sigma
    return x


def lcm(model: Model, x: torch.Tensor, sigmas: torch.Tensor, run: Run) -> torch.Tensor:
    """Latent consistency: the clean latent, and fresh noise on it for the next step."""
    batch, noise = x.new_ones(x.shape[0]), _noise(x, run)
    for i, (sigma, following) in enumerate(pairwise(sigmas)):
        x = model(x, sigma * batch)
        run.on_step(i, x)
        if following > 0:
            x = run.flow.noisy(following, noise(), x)
    return x


SAMPLERS: dict[str, Sampler] = {
    "euler": euler,
    "euler_ancestral": euler_ancestral,
    "heun": heun,
    "dpmpp_2m": dpmpp_2m,
    "dpmpp_sde": dpmpp_sde,
    "lcm": lcm,
    "res_multistep": res_multistep,
    "ddim": euler,  # with other noise under a mask, see sampling.sample
    "uni_pc": uni_pc,
}
