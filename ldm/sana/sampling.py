"""The sampling of SANA-Sprint, seen as an ordinary flow.

Its publisher walks along an angle, from a right one, which is noise, down to zero, and mixes data and noise by cosine
and sine. Divided by the sum of both this is the straight path of every flow model. There the network's input is the
mixture itself, its output the velocity, and one step of the publisher's sampler goes to the clean latent and then adds
new noise at the next time. That is a step of the sampler for consistency models, on a flow without shift.
"""
# sCM, "TrigFlow": x_t = cos(t) x0 + sin(t) noise, t from pi/2 to 0, everything scaled by sigma_data, which cancels.
# Divided by cos(t) + sin(t): x_s = (1 - s) x0 + s noise with s = sin(t) / (sin(t) + cos(t)). In s the network's time is
# s (not times 1000), its output noise - x0, and a step (LCM's) is x0 = x_s - s v, then new noise at the next s.
# Facts: diffusers' SCMScheduler and SanaSprintPipeline 0.42.1, compared with both beside ours; arXiv 2410.11081,
# 2503.09641.

from __future__ import annotations

import math

import torch

# A little above pi/2: the publisher starts with a cosine of -4e-6 (s = 1.0000037).
FIRST_ANGLE = 1.5708
# Where the second of two steps starts; other numbers of steps divide the angle evenly.
SECOND_OF_TWO = 1.3


def flow_time(angle: float) -> float:
    """s of an angle t in radians."""
    return math.sin(angle) / (math.sin(angle) + math.cos(angle))


def angle_of(time: float) -> float:
    """t in radians of a flow time s."""
    return math.atan2(time, 1.0 - time)


def sprint_angles(steps: int) -> list[float]:
    """The publisher's schedule: steps + 1 angles in radians, falling to 0. Raises ValueError below one step."""
    if steps < 1:
        raise ValueError(f"Sana-Sprint: {steps} steps were asked for; it takes 1 or more (the publisher uses 1 to 4)")
    if steps == 2:
        return [FIRST_ANGLE, SECOND_OF_TWO, 0.0]
    return [FIRST_ANGLE * (1.0 - i / steps) for i in range(steps)] + [0.0]


def sprint_sigmas(steps: int) -> list[float]:
    """The publisher's angles as flow times, for the sampler of consistency models. None is above one, which moves the
    first by next to nothing."""
    # 2 steps are 1, 0.7827, 0; the first moves by 4e-6.
    return [min(flow_time(angle), 1.0) for angle in sprint_angles(steps)]


def clean_from_velocity(x: torch.Tensor, velocity: torch.Tensor, time: float) -> torch.Tensor:
    """x0 from x_s and the network's output at s = ``time``."""
    return x - time * velocity


def noised(x0: torch.Tensor, noise: torch.Tensor, time: float) -> torch.Tensor:
    """x_s at s = ``time`` with new noise."""
    return (1.0 - time) * x0 + time * noise


def trigflow_output(x: torch.Tensor, velocity: torch.Tensor, time: float) -> torch.Tensor:
    """What the publisher's scheduler takes as the model's output, from the network's input, its output and its time."""
    # For sigma_data = 1: F of x0 = cos(t) x_t - sin(t) F, from x_s, the velocity and s.
    norm = math.sqrt(time**2 + (1.0 - time) ** 2)
    return ((1.0 - 2.0 * time) * x + (1.0 - 2.0 * time + 2.0 * time**2) * velocity) / norm


def trigflow_sample(x: torch.Tensor, time: float) -> torch.Tensor:
    """x_t (for sigma_data = 1) of an x_s."""
    return x / math.sqrt(time**2 + (1.0 - time) ** 2)
