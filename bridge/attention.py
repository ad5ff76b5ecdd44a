"""The attention seam's backend inside ComfyUI: whatever attention ComfyUI was started with."""

from __future__ import annotations

import comfy.ldm.modules.attention
import torch

from ..ldm.layers.attention import key_mask_bias


def comfyui_attention(q, k, v, mask=None, scale=None, transformer_options=None) -> torch.Tensor:
    """See ldm.layers.attention.attention for shapes.

    The function is looked up at each call because options and other packs replace it. The mask becomes additive:
    ComfyUI's sub-quadratic and split attention compute silently wrong results with a boolean one.
    """
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)  # 0.8 has no argument for it
    return comfy.ldm.modules.attention.optimized_attention(
        q,
        k,
        v,
        q.shape[1],
        mask=None if mask is None else key_mask_bias(mask, q.dtype),
        skip_reshape=True,
        # By keyword: only then does the override in the options take effect.
        transformer_options={} if transformer_options is None else transformer_options,
    )
