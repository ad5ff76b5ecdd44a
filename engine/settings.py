"""Sampling with the publisher's settings, and what nodes may set on a model for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..host import Graph, Sampled
from ..ldm.f_lite.sampling import adaptive_projected_guidance
from ..supported_models import decide
from .nodes_sampling import run_sampler
from .objects import Condition, Model
from .sampling import Guider, fit_empty_latent
from .schedules import sigmas_for


def sample(
    model: Model,
    positive: list[Condition],
    negative: list[Condition],
    latent: dict[str, Any],
    *,
    seed: int,
    steps: int,
    cfg: float,
    sampler: str,
    scheduler: str,
    shift: float,
    denoise: float,
    graph: Graph,
) -> Sampled:
    """See ``host.Host.sample``. Raises ValueError for a card's sampler or schedule that the engine does not have."""
    model = model.with_sampling(shift=shift) if shift > 0 else model.for_latent(fit_empty_latent(model, latent))
    settings = decide(
        model.architecture,
        file=model.file,
        steps=steps,
        cfg=cfg,
        sampler=sampler,
        scheduler=scheduler,
        shift=model.sampling.shift,
        denoise=denoise,
    )
    sigmas = sigmas_for(model.sampling, settings.scheduler, settings.steps, sampler=settings.sampler, denoise=denoise)
    guider = Guider(model, positive, negative, settings.cfg)
    done, _ = run_sampler(guider, latent, settings.sampler, sigmas, seed=seed)
    return Sampled(done, settings)


def set_model_sampling(model: Model, shift: float, latent: dict[str, Any] | None) -> Model:
    card = model.architecture.sampling
    if shift <= 0:
        shift = card.shift
        if latent is not None:
            shift = card.shift_for(*fit_empty_latent(model, latent).shape[-2:])
    return model.with_sampling(shift=shift)


def set_conditions(conditioning: list[Condition], values: Mapping[str, Any]) -> list[Condition]:
    return [(states, {**extra, **values}) for states, extra in conditioning]


def set_adaptive_projected_guidance(model: Model, limit: float) -> Model:
    def guided(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
        return adaptive_projected_guidance(cond, uncond, scale, limit=limit)

    return replace(model, guidance=guided)
