"""The publisher's own schedule among ComfyUI's schedulers, for KSampler, BasicScheduler and every other node."""

from __future__ import annotations

from typing import Any

import comfy.samplers
import torch

from ..supported_models import PUBLISHED
from .sampling import FlowPrediction, factor_of_shift


def install() -> None:
    """Adds one name; a scheduler of that name that another pack has added stays."""
    handlers = comfy.samplers.SCHEDULER_HANDLERS
    handlers.setdefault(PUBLISHED, comfy.samplers.SchedulerHandler(published))
    # One list in ComfyUI itself; a pack may have replaced either.
    for names in (comfy.samplers.SCHEDULER_NAMES, comfy.samplers.KSampler.SCHEDULERS):
        if PUBLISHED not in names:
            names.append(PUBLISHED)


def published(model_sampling: Any, steps: int) -> torch.Tensor:
    """[steps + 1] sigmas as the publisher has them; for a model without a schedule of its own, ComfyUI's ``simple``."""
    own = None
    if isinstance(model_sampling, FlowPrediction):
        card = model_sampling.nativedit_sampling
        own = card.published_schedule(steps, factor_of_shift(model_sampling, card.shift))
    return comfy.samplers.simple_scheduler(model_sampling, steps) if own is None else torch.tensor(own)
