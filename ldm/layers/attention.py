"""The attention seam: every DiT calls ``attention``; the host decides what computes it.

The default is PyTorch's scaled dot product attention. ComfyUI's side points the seam at its own
``optimized_attention`` with ``set_backend``; nothing in this package below the host knows which one runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def key_mask_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The additive form of a boolean key mask, broadcast over heads and queries: zero where attended, the lowest finite
    value elsewhere. A finite value keeps a row finite that is masked whole; infinite ones would make it NaN.
    """
    # mask [B, L_k], True (or nonzero) = attend -> [B, 1, 1, L_k] of `dtype`.
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
    q: torch.Tensor,  # [B, H, L_q, D]
    k: torch.Tensor,  # [B, H, L_k, D]
    v: torch.Tensor,  # [B, H, L_k, D]
    *,
    mask: torch.Tensor | None = None,  # [B, L_k], True = attend
    scale: float | None = None,  # None = D ** -0.5
    transformer_options: dict | None = None,
) -> torch.Tensor:  # [B, L_q, H * D]
    """Softmax attention. Heads come before positions in what it takes; they are joined in what it gives."""
    return _backend(q, k, v, mask=mask, scale=scale, transformer_options=transformer_options)
