"""The attention seam: every DiT calls ``attention``; the host decides what computes it.

The default is PyTorch's scaled dot product attention. ComfyUI's side points the seam at its own
``optimized_attention`` with ``set_backend``; nothing in this package below the host knows which one runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def key_mask_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive form of a boolean key mask.

    mask: [B, L_k], True (or nonzero) = attend. Returns [B, 1, 1, L_k] of ``dtype``: 0 where attended, the lowest
    finite value elsewhere. A finite value keeps a fully masked row finite (a plain -inf row is NaN after softmax).
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill(~mask.bool(), torch.finfo(dtype).min)[:, None, None, :]


def sdpa(q, k, v, mask=None, scale=None, transformer_options=None) -> torch.Tensor:
    """PyTorch's own attention; see ``attention`` for shapes. ``transformer_options`` is ComfyUI's business."""
    bias = None if mask is None else key_mask_bias(mask, q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    return out.transpose(1, 2).flatten(2)


_backend: Callable[..., torch.Tensor] = sdpa


def set_backend(backend: Callable[..., torch.Tensor] | None) -> None:
    """Point the seam at another implementation with ``sdpa``'s signature; None restores PyTorch's."""
    global _backend
    _backend = backend or sdpa


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    transformer_options: dict | None = None,
) -> torch.Tensor:
    """Softmax attention.

    q: [B, H, L_q, D], k and v: [B, H, L_k, D]; mask: boolean key mask [B, L_k], True = attend, or None;
    scale: defaults to D ** -0.5. Returns [B, L_q, H * D].
    """
    return _backend(q, k, v, mask=mask, scale=scale, transformer_options=transformer_options)
