"""What quantize, dequantize and repair tell about their work."""

from __future__ import annotations

from dataclasses import dataclass, field

from .policy import Decision

__all__ = ["QuantizationReport"]


@dataclass
class QuantizationReport:
    """What was decided and done. Sizes in bytes; ``warnings`` are sentences."""

    source: str
    destination: str
    format: str
    decisions: list[Decision]
    bytes_before: int
    bytes_after: int = 0
    seconds: float = 0.0
    written: bool = False
    warnings: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.recipe is not None]

    @property
    def kept(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.recipe is None]

    def table(self) -> str:
        """One line per layer: format, bytes before and after, why."""
        lines = []
        for decision in self.decisions:
            what = str(decision.recipe) if decision.recipe else f"keep {decision.dtype}"
            sizes = f"{decision.bytes_before:>14,} -> {decision.bytes_after:>14,}"
            lines.append(f"{decision.layer:<60} {what:<34} {sizes}  {decision.why}")
        return "\n".join(lines)

    def __str__(self) -> str:
        verb = "quantized" if self.written else "would quantize"
        return (
            f"{verb} {len(self.quantized)} of {len(self.decisions)} weights as {self.format}, "
            f"{self.bytes_before / 1e9:.2f} GB -> {self.bytes_after / 1e9:.2f} GB"
        )
