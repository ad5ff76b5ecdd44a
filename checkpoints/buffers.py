"""Buffers that one layout stores and the other works out: made anew, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def minimax_h3_frequencies(config: Mapping[str, Any]) -> torch.Tensor:
    """The frequencies of its rotary embedding as a vector in float32, computed as the class of diffusers does it."""
    # rope.inv_freq [rope_freq_dim]: theta to the power of -i / count.
    count, theta = config.get("rope_freq_dim", 16), config.get("rope_theta", 10000.0)
    return 1.0 / (theta ** (torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count)))
