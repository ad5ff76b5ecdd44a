"""Attention without softmax: relu(q) . relu(k) as the kernel, in time proportional to the number of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Keeps a query that no key answers (all products zero) finite: its result is 0.
EPS = 1e-15


def linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v: [B, L, H, D], heads after positions, of any float dtype. Returns [B, L, H * D] of the same dtype.

    out_i = sum_j (relu(q_i) . relu(k_j)) v_j / sum_j relu(q_i) . relu(k_j), in float32: the sums run over all tokens
    (16384 in a 4K picture) and overflow float16. Source: Sana (arXiv 2410.10629), EfficientViT (arXiv 2205.14756).
    """
    dtype = v.dtype
    q, k, v = (t.float().transpose(1, 2) for t in (F.relu(q), F.relu(k), v))
    # The sum of weights rides along as one more channel: two small products instead of four.
    states = torch.cat((k.transpose(-1, -2) @ v, k.sum(dim=-2)[..., None]), dim=-1)  # [B, H, D, D + 1]
    out, total = (q @ states).split((v.shape[-1], 1), dim=-1)
    return (out / (total + EPS)).transpose(1, 2).flatten(2).to(dtype)
