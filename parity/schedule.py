"""What surrounds the network: sigmas, timesteps and prompts of a card beside those of the published pipeline.

A port whose network agrees can still make other pictures, and the cause is then here. It is reported apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..latent_formats import get_latent_format
from ..supported_models import Architecture
from ..text_encoders.prompt import prompt_text
from .port import ReferencePipeline

__all__ = ["PROMPTS", "ScheduleResult", "compare_schedules"]

# What a pipeline may do to a prompt: case, addresses, entities, blanks, decoration, scripts.
PROMPTS = (
    "",
    "A Red Fox, oil on canvas",
    "  photo by @someone, see https://example.com/picture.jpg  ",
    "caf\u00e9 &amp; cr\u00e8me &lt;3 -- 4k!!!",
    "\u4e00\u53ea\u72d0\u72f8 in the snow",
    'a sign that says "OPEN 24/7"',
)
STEPS = (4, 20)
# Tables are computed in float32 and hold values up to 1.
TOLERANCE = 1e-5

CardSigmas = Callable[[Architecture, int, int, int], list[float]]


@dataclass(frozen=True)
class ScheduleResult:
    """pipeline: whose; sigmas: steps -> (ours, theirs); timesteps: what the network is given for a sigma (sigma, ours,
    theirs); prompts: (prompt, our text, their text) where the two differ."""

    pipeline: str
    sigmas: dict[int, tuple[list[float], list[float]]]
    timesteps: tuple[tuple[float, float, float], ...]
    prompts: tuple[tuple[str, str, str], ...]

    @property
    def differences(self) -> list[str]:
        """Sentences; empty when all agrees."""
        found = []
        for steps, (ours, theirs) in self.sigmas.items():
            if len(ours) != len(theirs):
                found.append(f"{steps} steps: {len(ours)} sigmas, {self.pipeline} has {len(theirs)}")
                continue
            gap, index = max((abs(a - b), i) for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
            if gap > TOLERANCE:
                found.append(
                    f"{steps} steps: sigmas differ, most at {index}: {ours[index]:.5f}, in {self.pipeline} "
                    f"{theirs[index]:.5f}"
                )
        for sigma, ours, theirs in self.timesteps:
            if abs(ours - theirs) > TOLERANCE * max(1.0, abs(theirs)):
                found.append(f"at sigma {sigma:.3f} the network is given {ours:.5f}, in {self.pipeline} {theirs:.5f}")
        for prompt, ours, theirs in self.prompts:
            found.append(f"prompt {prompt!r} becomes {ours!r}, in {self.pipeline} {theirs!r}")
        return found


def compare_schedules(card: Architecture, pipeline: ReferencePipeline, card_sigmas: CardSigmas) -> ScheduleResult:
    """At 4 and 20 steps and the card's default size. card_sigmas(card, steps, latent height, latent width): what a
    sampler would use, the last one 0. What is not known of the pipeline is not compared."""
    compression = get_latent_format(card.latent_format).compression
    size = card.defaults.height // compression, card.defaults.width // compression
    sigmas = {}
    if pipeline.sigmas is not None:
        sigmas = {steps: (card_sigmas(card, steps, *size), pipeline.sigmas(steps, *size)) for steps in STEPS}
    timesteps = ()
    if pipeline.timestep is not None:
        timesteps = tuple(
            (sigma, timestep_of(card, sigma, *size), pipeline.timestep(sigma, *size)) for sigma in (1.0, 0.7, 0.1)
        )
    prompts = ()
    if pipeline.clean is not None and card.prompt is not None:
        pairs = ((prompt, prompt_text(card.prompt, prompt), pipeline.clean(prompt)) for prompt in PROMPTS)
        prompts = tuple(pair for pair in pairs if pair[1] != pair[2])
    return ScheduleResult(pipeline.name, sigmas, timesteps, prompts)


def timestep_of(card: Architecture, sigma: float, latent_height: int, latent_width: int) -> float:
    """What the card says the network is given for a sigma."""
    sampling = card.sampling
    if sampling.timestep_before_shift:
        shift = sampling.shift_for(latent_height, latent_width)
        sigma = sigma / (shift - (shift - 1) * sigma)
    return sigma * sampling.multiplier
