"""F-Lite's times and its guidance."""
# Source: the published pipeline's numbers (fal-ai/f-lite at 85f0471).

from __future__ import annotations

import torch


def shift_of_latent(latent_height: int, latent_width: int) -> float:
    """The shift for a latent of this size: 2 * sqrt(height * width) / 64. 1024 x 1024 pixels: 4."""
    return 2.0 * (latent_height * latent_width) ** 0.5 / 64


def times(steps: int) -> list[float]:
    """The published schedule before its shift: evenly from 1, without the last 0."""
    return [1 - i / steps for i in range(steps)]


def sigmas(steps: int, shift: float) -> list[float]:
    """The published schedule: ``steps`` sigmas from 1, then 0, evenly spaced before the shift."""
    return [shift * time / (1 + (shift - 1) * time) for time in times(steps)] + [0.0]


def adaptive_projected_guidance(
    cond: torch.Tensor, uncond: torch.Tensor, scale: float, *, limit: float = 0.03
) -> torch.Tensor:
    """Guidance without the part of the difference that points along ``cond``, which is what burns colours.

    cond, uncond: velocities of one shape. The remaining part is made smaller where its standard deviation is above
    ``limit``. Projection and deviation are over the whole tensor, the batch included, as the publisher does it.
    """
    difference = cond - uncond
    across = difference - (cond * difference).sum() / cond.square().sum() * cond
    across = across * (limit / across.std()).clamp(max=1.0)
    return cond + (scale - 1) * across
