"""CogView4's times: the shift follows the picture's size, and the model is told the time before the shift.

All functions take and return floats or tensors.
"""
# Source: diffusers' CogView4Pipeline 0.42.1 with the published scheduler (linear dynamic shift), which is the published
# behaviour; diffusers 0.40.0 alone gave the model the shifted time.

from __future__ import annotations

PATCH_SIZE = 2
TRAIN_STEPS = 1000


def shift_of_latent(latent_height: int, latent_width: int) -> float:
    """The shift for a latent of this size: 0.75 * sqrt(tokens / 256) + 0.25. 1024 x 1024 pixels: 3.25."""
    tokens = latent_height * latent_width // PATCH_SIZE**2
    return 0.75 * (tokens / 256) ** 0.5 + 0.25


def shifted(time, shift: float):
    """Time 0..1 -> sigma 0..1."""
    return shift * time / (1 + (shift - 1) * time)


def unshifted(sigma, shift: float):
    """Sigma 0..1 -> the time it was shifted from."""
    return sigma / (shift - (shift - 1) * sigma)


def timestep(sigma, shift: float):
    """What the transformer is given for a sigma: 0..1000, before the shift."""
    return TRAIN_STEPS * unshifted(sigma, shift)


def times(steps: int) -> list[float]:
    """The published schedule before its shift: whole thousandths, evenly from 1 down to 0.001."""
    if steps == 1:
        return [1.0]
    gap = (TRAIN_STEPS - 1) / (steps - 1)
    return [int(TRAIN_STEPS - gap * i) / TRAIN_STEPS for i in range(steps - 1)] + [1 / TRAIN_STEPS]


def sigmas(steps: int, shift: float) -> list[float]:
    """The published schedule: ``steps`` sigmas from 1, then 0."""
    return [shifted(time, shift) for time in times(steps)] + [0.0]
