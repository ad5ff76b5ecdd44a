"""Sigmas to sample at, falling from the first to 0. Every schedule gives the numbers of ComfyUI's of the same name.

A schedule is a function of the sampling and the steps, and gives one sigma more than steps; there are two that may give
fewer or more.
"""
# Sigmas are float32. `beta` may give fewer, `ddim_uniform` more.

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..supported_models import PUBLISHED
from .beta_quantile import beta_quantile
from .flow import FlowSampling

__all__ = ["SCHEDULES", "sigmas_for"]

Schedule = Callable[[FlowSampling, int], torch.Tensor]

# One more step is planned and the last but one dropped, because these samplers evaluate at the end of each step.
DROP_LAST_BUT_ONE = frozenset({"dpm_2", "dpm_2_ancestral", "uni_pc", "uni_pc_bh2"})


def _falling(sigmas: list[float]) -> torch.Tensor:
    return torch.tensor([*sigmas, 0.0], dtype=torch.float32)


def simple(sampling: FlowSampling, steps: int) -> torch.Tensor:
    """Evenly spaced entries of the sigma table."""
    table = sampling.sigmas.tolist()
    stride = len(table) / steps
    return _falling([table[-1 - int(i * stride)] for i in range(steps)])


def normal(sampling: FlowSampling, steps: int) -> torch.Tensor:
    """Evenly spaced timesteps, the last one the smallest of the table."""
    start, end = sampling.timestep(sampling.sigma_max), sampling.timestep(sampling.sigma_min)
    if math.isclose(float(sampling.sigma(end)), 0, abs_tol=1e-5):
        return torch.tensor([float(sampling.sigma(t)) for t in torch.linspace(start, end, steps + 1)])
    return _falling([float(sampling.sigma(t)) for t in torch.linspace(start, end, steps)])


def sgm_uniform(sampling: FlowSampling, steps: int) -> torch.Tensor:
    """Evenly spaced timesteps down to the smallest of the table, which is left out."""
    start, end = sampling.timestep(sampling.sigma_max), sampling.timestep(sampling.sigma_min)
    return _falling([float(sampling.sigma(t)) for t in torch.linspace(start, end, steps + 1)[:-1]])


def karras(sampling: FlowSampling, steps: int, rho: float = 7.0) -> torch.Tensor:
    """Karras et al. (2022), eq. 5: evenly spaced in sigma ** (1 / rho)."""
    low, high = (float(s) ** (1 / rho) for s in (sampling.sigma_min, sampling.sigma_max))
    ramp = torch.linspace(0, 1, steps)
    return torch.cat(((high + ramp * (low - high)) ** rho, torch.zeros(1)))


def exponential(sampling: FlowSampling, steps: int) -> torch.Tensor:
    """Evenly spaced in log sigma."""
    low, high = (math.log(float(s)) for s in (sampling.sigma_min, sampling.sigma_max))
    return torch.cat((torch.linspace(high, low, steps).exp(), torch.zeros(1)))


def beta(sampling: FlowSampling, steps: int, alpha: float = 0.6) -> torch.Tensor:
    """Dense at both ends, by the quantiles of the beta distribution. Repeats are dropped."""
    # Beta(0.6, 0.6). Source: Lee et al., arXiv 2407.12173.
    table = sampling.sigmas.tolist()
    picked: list[int] = []
    for i in range(steps):
        index = round(beta_quantile(1 - i / steps, alpha, alpha) * (len(table) - 1))
        if not picked or index != picked[-1]:
            picked.append(index)
    return _falling([table[index] for index in picked])


def ddim_uniform(sampling: FlowSampling, steps: int) -> torch.Tensor:
    """Every n-th entry of the table from the second on. One sigma more when ``steps`` does not divide the table."""
    table = sampling.sigmas.tolist()
    near_zero = math.isclose(table[1], 0, abs_tol=1e-5)
    stride = max(len(table) // (steps + 1 if near_zero else steps), 1)
    picked = table[1::stride][::-1]
    return torch.tensor(picked, dtype=torch.float32) if near_zero else _falling(picked)


def published(sampling: FlowSampling, steps: int) -> torch.Tensor:
    """The publisher's own, for a model that has one; else ``simple``."""
    own = None if sampling.card is None else sampling.card.published_schedule(steps, sampling.shift)
    return simple(sampling, steps) if own is None else torch.tensor(own, dtype=torch.float32)


SCHEDULES: dict[str, Schedule] = {
    "simple": simple,
    "sgm_uniform": sgm_uniform,
    "karras": karras,
    "exponential": exponential,
    "ddim_uniform": ddim_uniform,
    "beta": beta,
    "normal": normal,
    PUBLISHED: published,
}


def sigmas_for(
    sampling: FlowSampling, scheduler: str, steps: int, *, sampler: str | None = None, denoise: float = 1.0
) -> torch.Tensor:
    """What KSampler samples at. denoise below 1 plans more steps and keeps the last ``steps`` of them; 0 keeps none.

    sampler: its name, where one needs a changed schedule. Raises KeyError for an unknown scheduler.
    """
    if denoise <= 0:
        return torch.zeros(0)
    planned = steps if denoise > 0.9999 else int(steps / denoise)
    schedule = SCHEDULES[scheduler]
    if sampler in DROP_LAST_BUT_ONE:
        sigmas = schedule(sampling, planned + 1)
        sigmas = torch.cat((sigmas[:-2], sigmas[-1:]))
    else:
        sigmas = schedule(sampling, planned)
    return sigmas if planned == steps else sigmas[-(steps + 1) :]
