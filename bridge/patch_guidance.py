"""Guidance that keeps every patch's strength, in ComfyUI."""

from __future__ import annotations

from typing import Any

import torch

from ..ldm.nucleus.sampling import patch_renormalized_guidance


def set_patch_renormalized_guidance(model: Any, patch_size: int) -> Any:
    """A copy of the model. Raises nothing: ComfyUI calls the function with the cfg of whichever sampler comes."""

    def guided(args: dict[str, Any]) -> torch.Tensor:
        # ComfyUI's differences x - x0 are a multiple of the velocity, which is all that this guidance needs.
        return patch_renormalized_guidance(args["cond"], args["uncond"], args["cond_scale"], patch_size=patch_size)

    patched = model.clone()
    patched.set_model_sampler_cfg_function(guided)
    return patched
