"""What quantize, dequantize and repair tell about their work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .allocation import Allocation, Choice
from .budget import gigabytes
from .measuring import decibels_of
from .policy import Decision

__all__ = ["QuantizationReport"]


@dataclass
class QuantizationReport:
    """What was decided and done. Sizes in bytes; ``warnings`` are sentences.

    ``measured``: each layer's error in what was chosen and in what else was possible, None unless a budget or a report
    asked for it. ``budget`` as noted in the header, ``plan`` the choice as a policy; both empty without a budget.
    ``file_size``: of the finished file or files, headers included. ``format``: the recipes in use, the most frequent
    first.
    """

    source: str
    destination: str
    format: str
    decisions: list[Decision]
    bytes_before: int
    bytes_after: int = 0
    seconds: float = 0.0
    written: bool = False
    warnings: list[str] = field(default_factory=list)
    measured: Allocation | None = None
    budget: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    file_size: int = 0

    @property
    def sqnr(self) -> float | None:
        """Signal to noise in decibels over all matrices of the model, None when it was not measured."""
        return None if self.measured is None else self.measured.sqnr

    @property
    def quantized(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.recipe is not None]

    @property
    def kept(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.recipe is None]

    def table(self) -> str:
        """One line per layer: format, bytes before and after, decibels if they were measured, why."""
        choices = {choice.layer: choice for choice in self.measured.choices} if self.measured is not None else {}
        lines = []
        for decision in self.decisions:
            what = str(decision.recipe) if decision.recipe else f"keep {decision.dtype}"
            sizes = f"{decision.bytes_before:>14,} -> {decision.bytes_after:>14,}"
            error = f"  {_decibels(choices.get(decision.layer)):>8}" if choices else ""
            lines.append(f"{decision.layer:<60} {what:<34} {sizes}{error}  {decision.why}")
        return "\n".join(lines)

    def __str__(self) -> str:
        verb = "quantized" if self.written else "would quantize"
        after = self.file_size or self.bytes_after
        formats = f" as {self.format}" if self.quantized else ""
        text = f"{verb} {len(self.quantized)} of {len(self.decisions)} weights{formats}, "
        text += f"{gigabytes(self.bytes_before)} -> {gigabytes(after)}"
        sqnr = self.sqnr
        return text if sqnr is None else f"{text}, {'exact' if sqnr == math.inf else f'{sqnr:.2f} dB'}"


def _decibels(choice: Choice | None) -> str:
    if choice is None:
        return ""
    value = decibels_of(choice.signal, choice.option.noise)
    return "exact" if value == math.inf else f"{value:.1f} dB"
