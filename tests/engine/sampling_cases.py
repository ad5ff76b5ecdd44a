"""What is sampled to compare the engine with ComfyUI: a small analytic model, and the cases. Needs torch alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHAPE = (2, 3, 4, 6)
SEED = 7
STEPS = (1, 2, 4, 20)
SCHEDULES = ("simple", "normal", "sgm_uniform", "karras", "exponential", "beta", "ddim_uniform")
SAMPLERS = (
    "euler",
    "euler_ancestral",
    "heun",
    "dpmpp_2m",
    "dpmpp_sde",
    "uni_pc",
    "res_multistep",
    "lcm",
    "ddim",
)
# sampling settings of a card: (shift, multiplier, noise_scale)
FLOWS = {"plain": (1.0, 1000.0, 1.0), "pixel": (3.0, 1.0, 2.0)}


@dataclass(frozen=True)
class Case:
    flow: str
    sampler: str
    scheduler: str
    steps: int
    denoise: float = 1.0
    masked: bool = False

    @property
    def name(self) -> str:
        masked = "/masked" if self.masked else ""
        return f"{self.flow}/{self.sampler}/{self.scheduler}/{self.steps}/{self.denoise}{masked}"


def cases() -> list[Case]:
    found = [Case("pixel", sampler, "simple", steps) for sampler in SAMPLERS for steps in STEPS]
    found += [Case("pixel", sampler, scheduler, 6) for sampler in SAMPLERS for scheduler in ("karras", "beta")]
    found += [Case("plain", sampler, "normal", 5) for sampler in SAMPLERS]
    found += [Case("pixel", sampler, "simple", 4, 0.6, masked=True) for sampler in SAMPLERS]
    return found


def toy_x0(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """A smooth clean latent for any noisy one: neither linear in x nor independent of sigma [B]."""
    pattern = torch.arange(x[0].numel(), dtype=torch.float32).reshape(x.shape[1:])
    sigma = sigma.reshape(-1, 1, 1, 1)
    return torch.tanh(0.4 * x + torch.sin(pattern)) * (1.0 - 0.3 * sigma) + 0.1 * torch.cos(3.0 * x) * sigma


def start() -> tuple[torch.Tensor, torch.Tensor]:
    """(latent that is painted over, noise mask): plain numbers, no random ones."""
    count = torch.arange(SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3], dtype=torch.float32)
    latent = torch.cos(0.7 * count).reshape(SHAPE)
    mask = torch.zeros(1, 1, 4, 6)
    mask[..., 2:] = 1.0
    mask[..., 1] = 0.5
    return latent, mask
