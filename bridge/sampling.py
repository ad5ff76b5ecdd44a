"""How our models' outputs become denoised pictures, and how that survives ComfyUI's ModelSampling nodes."""

from __future__ import annotations

import functools
import math

import comfy.model_sampling
import torch

from ..supported_models import Sampling


class FlowPrediction:
    """Stands before ComfyUI's flow classes, for what those do not express: predictions other than velocity."""

    # comfy.model_sampling.CONST stays among the bases, because samplers ask for it.

    nativedit_sampling: Sampling

    def calculate_denoised(self, sigma, model_output, model_input):
        sigma = comfy.model_sampling.reshape_sigma(sigma, model_output.ndim)
        prediction = self.nativedit_sampling.prediction
        if prediction == "x0":
            floor = self.nativedit_sampling.x0_sigma_floor
            # The reference divides by max(sigma, floor) on the way to a velocity: below it, a step stops short of x0.
            step = (sigma / sigma.clamp(min=floor)) if floor else torch.ones_like(sigma)
            return torch.where(step < 1, model_input + (model_output - model_input) * step, model_output)
        return model_input - sigma * (model_output if prediction == "velocity" else -model_output)

    def noise_scaling(self, sigma, noise, latent_image, max_denoise=False):
        sigma = comfy.model_sampling.reshape_sigma(sigma, noise.ndim)
        # ComfyUI 0.8 knows no noise scale; the card's holds there.
        scale = getattr(self, "noise_scale", self.nativedit_sampling.noise_scale)
        return sigma * (scale * noise) + (1.0 - sigma) * latent_image


@functools.cache
def sampling_class(base: type, sampling: Sampling) -> type:
    """``base`` (a flow sampling class of ComfyUI) with our prediction in front."""
    return type(f"NativeDiT{base.__name__}", (FlowPrediction, base), {"nativedit_sampling": sampling})


def keep_prediction(model_sampling, sampling: Sampling) -> None:
    """Put our prediction into a sampling object that ComfyUI or a node made, in place.

    Nodes that set a shift replace the object by a plain flow one, which would read a clean picture as a velocity.
    Objects of other kinds are left alone: whoever sets them wants exactly that.
    """
    # Such nodes are ModelSamplingSD3, ModelSamplingAuraFlow and ModelSamplingFlux; other kinds are EPS, EDM and so on.
    if isinstance(model_sampling, comfy.model_sampling.CONST) and not isinstance(model_sampling, FlowPrediction):
        model_sampling.__class__ = sampling_class(type(model_sampling), sampling)


def factor_of_shift(model_sampling, default: float) -> float:
    """The factor of a time shift (FLUX's sampling keeps its logarithm); ``default`` for one without a shift."""
    shift = getattr(model_sampling, "shift", default)
    return math.exp(shift) if isinstance(model_sampling, comfy.model_sampling.ModelSamplingFlux) else shift


def reference_timestep(timestep: torch.Tensor, model_sampling, sampling: Sampling) -> torch.Tensor:
    """The timestep that the reference transformer got, whatever multiplier a node has set (SD3's sets 1000)."""
    multiplier = getattr(model_sampling, "multiplier", 1.0)
    if sampling.timestep_before_shift:
        sigma, shift = timestep / multiplier, factor_of_shift(model_sampling, sampling.shift)
        return sigma / (shift - (shift - 1) * sigma) * sampling.multiplier
    return timestep if multiplier == sampling.multiplier else timestep / multiplier * sampling.multiplier
