"""What "auto" means in a sampler's widgets: the publisher's settings, from the card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._architecture import Architecture

AUTO = "auto"
# The publisher's own schedule, where a card has one.
PUBLISHED = "published"


@dataclass(frozen=True)
class Settings:
    """A sampler's settings, all of them decided. shift None: the model's sampling has none."""

    steps: int
    cfg: float
    sampler: str
    scheduler: str
    shift: float | None = None
    denoise: float = 1.0

    @property
    def text(self) -> str:
        """One line for people."""
        parts = [f"{self.steps} steps", f"cfg {self.cfg:g}", self.sampler, self.scheduler]
        if self.shift is not None:
            parts.append(f"shift {self.shift:.4g}")
        if self.denoise < 1:
            parts.append(f"denoise {self.denoise:g}")
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For a picture's metadata."""
        return {key: value for key, value in vars(self).items() if value is not None}


def decide(
    card: Architecture | None,
    *,
    file: str | None = None,
    steps: int = 0,
    cfg: float = -1.0,
    sampler: str = AUTO,
    scheduler: str = AUTO,
    shift: float | None = None,
    denoise: float = 1.0,
) -> Settings:
    """Settings with the card's for what is left open: steps 0, cfg below 0, "auto".

    file: the model's file, whose name tells distilled and turbo variants apart; shift: as the host has settled it.
    Raises ValueError when something is left open that no card knows.
    """
    defaults = None if card is None else card.defaults_for(file)
    given = {"steps": steps > 0, "cfg": cfg >= 0, "sampler_name": sampler != AUTO, "scheduler": scheduler != AUTO}
    left = [name for name, is_given in given.items() if not is_given]
    if left and defaults is None:
        title = "this model" if card is None else card.title
        raise ValueError(f"NativeDiT knows no settings of {title}; choose {', '.join(left)} yourself")
    own = card is not None and card.sampling is not None and (card.sampling.times or card.sampling.sigmas)
    if scheduler in (AUTO, PUBLISHED):
        scheduler = PUBLISHED if own else defaults.scheduler if defaults is not None else "simple"
    return Settings(
        steps=steps if steps > 0 else defaults.steps,
        cfg=cfg if cfg >= 0 else defaults.cfg,
        sampler=defaults.sampler if sampler == AUTO else sampler,
        scheduler=scheduler,
        shift=shift,
        denoise=denoise,
    )
