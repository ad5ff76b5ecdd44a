"""Sampling with the publisher's settings, and a shift that follows the latent's size, in ComfyUI."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import comfy.model_sampling
import comfy.sample
import comfy.samplers
import comfy.utils
import torch

from ..host import Graph, Sampled
from ..ldm.f_lite.sampling import adaptive_projected_guidance
from ..supported_models import Architecture, Settings, decide, find_architecture
from .hooks import guarded, wrap_once
from .kept_settings import keep
from .model import NativeDiTModel
from .sampling import keep_prediction

SHIFT_PATCH = "model_sampling"


def install() -> None:
    wrap_once(comfy.sample, "sample", _sample)


def _sample(original: Callable[..., Any], model: Any, noise: Any, *args: Any, **kwargs: Any) -> Any:
    """ComfyUI's sample(model, noise, steps, cfg, ...), which KSampler and others call: the last place where the
    latent's size is known and its sigmas are not made yet. Where a node has set the sampling, it stays as set."""
    sized = None
    with guarded("the shift by the latent's size"):
        sized = for_latent(model, noise)
    return original(model if sized is None else sized, noise, *args, **kwargs)


def for_latent(model: Any, samples: Any) -> Any:
    """The model with the shift of these samples' size, itself where its shift does not depend on it."""
    card = card_of_ours(model)
    if card is None:
        return model
    if SHIFT_PATCH in model.object_patches:
        # Our prediction is put in when the model runs; its own schedule is looked for before that.
        keep_prediction(model.object_patches[SHIFT_PATCH], card.sampling)
        return model
    if card.sampling.shift_of_latent is None:
        return model
    shift = card.sampling.shift_for(*samples.shape[-2:])
    return model if shift == shift_of(model) else with_shift(model, shift)


def card_of_ours(model: Any) -> Architecture | None:
    base = getattr(model, "model", None)
    return base.model_config.card if isinstance(base, NativeDiTModel) else None


def shift_of(model: Any) -> float | None:
    return getattr(model.get_model_object("model_sampling"), "shift", None)


def with_shift(model: Any, shift: float) -> Any:
    """A copy of the model that is sampled with this time shift. Raises ValueError for a model that has none."""
    current = model.get_model_object("model_sampling")
    if not isinstance(getattr(current, "shift", None), (int, float)) or not hasattr(current, "set_parameters"):
        raise ValueError(f"this model's sampling ({type(current).__name__}) has no shift to set; set shift to 0")
    changed = copy.deepcopy(current)  # noise scale, multiplier and whatever else a node has set
    if isinstance(current, comfy.model_sampling.ModelSamplingFlux):
        changed.set_parameters(shift=shift)
    else:
        changed.set_parameters(shift=shift, multiplier=current.multiplier)
    patched = model.clone()
    patched.add_object_patch(SHIFT_PATCH, changed)
    return patched


def set_model_sampling(model: Any, shift: float, latent: dict[str, Any] | None) -> Any:
    """shift 0: by the latent's size where one is given and the model's shift follows it, else the model's own."""
    if shift > 0:
        return with_shift(model, shift)
    card = card_of_ours(model)
    if card is None:
        return model
    if latent is None or card.sampling.shift_of_latent is None:
        return with_shift(model, card.sampling.shift)
    samples = _fitted(model, latent)
    return with_shift(model, card.sampling.shift_for(*samples.shape[-2:]))


def card_of(model: Any) -> Architecture | None:
    """Of one of ours, or of a model that core loads and a card describes."""
    card = card_of_ours(model)
    if card is not None:
        return card
    module = getattr(getattr(model, "model", None), "diffusion_model", None)
    if module is None:
        return None
    found = find_architecture({key: tuple(value.shape) for key, value in module.state_dict().items()})
    return None if found is None else found.architecture


def file_of(model: Any) -> str | None:
    """The file a model was loaded from, as far as ComfyUI or our model base remembers it."""
    own = getattr(getattr(model, "model", None), "nativedit_file", None)
    if own is not None:
        return own
    initial = getattr(model, "cached_patcher_init", None)
    path = initial[1][0] if initial else None
    return path if isinstance(path, str) else None


def sample(
    model: Any,
    positive: Any,
    negative: Any,
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
    samples = _fitted(model, latent)
    model = with_shift(model, shift) if shift > 0 else for_latent(model, samples)
    settings = decide(
        card_of(model),
        file=file_of(model),
        steps=steps,
        cfg=cfg,
        sampler=sampler,
        scheduler=scheduler,
        shift=shift_of(model),
        denoise=denoise,
    )
    _show(settings.text, graph.node_id)
    done = _run(model, settings, positive, negative, latent, samples, seed)
    keep(graph.prompt, graph.node_id, settings.as_dict())
    kept = {key: value for key, value in latent.items() if not key.startswith("downscale_ratio_")}
    return Sampled({**kept, "samples": done}, settings)


def _run(
    model: Any,
    settings: Settings,
    positive: Any,
    negative: Any,
    latent: dict[str, Any],
    samples: torch.Tensor,
    seed: int,
) -> torch.Tensor:
    import latent_preview

    return comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(samples, seed, latent.get("batch_index")),
        settings.steps,
        settings.cfg,
        settings.sampler,
        settings.scheduler,
        positive,
        negative,
        samples,
        denoise=settings.denoise,
        noise_mask=latent.get("noise_mask"),
        callback=latent_preview.prepare_callback(model, settings.steps),
        disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
        seed=seed,
    )


def _fitted(model: Any, latent: dict[str, Any]) -> torch.Tensor:
    """The samples; an all-zero latent takes the channels and the size that the model wants, as in KSampler."""
    ratios = ("downscale_ratio_spacial", "downscale_ratio_temporal")
    given = [latent.get(name) for name in ratios]
    fit = comfy.sample.fix_empty_latent_channels
    # ComfyUI 0.8 knows no ratios
    return fit(model, latent["samples"], *given[: max(fit.__code__.co_argcount - 2, 0)])


def _show(text: str, node_id: str | None) -> None:
    """On the node itself, while it runs and after."""
    if node_id is None:
        return
    with guarded("the line of settings on the node"):
        running = sys.modules.get("server")  # there when ComfyUI serves anyone; importing it would start half of it
        if running is not None:
            running.PromptServer.instance.send_progress_text(text, node_id)


def set_conditions(conditioning: Any, values: dict[str, Any]) -> Any:
    """``values`` beside every prompt of a CONDITIONING, for the models that ask for them by name."""
    return [[states, {**extra, **values}] for states, extra in conditioning]


def set_adaptive_projected_guidance(model: Any, limit: float) -> Any:
    def guided(args: dict[str, Any]) -> torch.Tensor:
        # ComfyUI's differences x - x0 are sigma times the velocity, for which the method is made.
        sigma = args["sigma"].reshape(-1, *(1,) * (args["cond"].ndim - 1))
        cond, uncond = args["cond"] / sigma, args["uncond"] / sigma
        return adaptive_projected_guidance(cond, uncond, args["cond_scale"], limit=limit) * sigma

    patched = model.clone()
    patched.set_model_sampler_cfg_function(guided)
    return patched


def samplers() -> list[str]:
    return list(comfy.samplers.KSampler.SAMPLERS)


def schedulers() -> list[str]:
    return list(comfy.samplers.KSampler.SCHEDULERS)
