"""How well a LoRA fits a model, in words: layers that the model lacks, and layers of another size than the model's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass
class Fit:
    """layers: how many the LoRA has for this part of a model, ``part``: what it is called; missing: those that the
    model has not; other_size: layer -> (shape that it changes, shape of the model's weight)."""

    layers: int
    part: str
    missing: list[str] = field(default_factory=list)
    other_size: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)

    @property
    def applied(self) -> int:
        return self.layers - len(self.missing) - len(self.other_size)

    @property
    def too_little(self) -> bool:
        """Under half of it would be applied: such a LoRA was made for another model."""
        return 2 * self.applied < self.layers

    def reasons(self) -> str:
        """What was not applied and why; empty when all was."""
        reasons = []
        if self.missing:
            reasons.append(f"not found in the {self.part}: {_some(sorted(self.missing))}")
        if self.other_size:
            reasons.append(f"of another size than in the {self.part}: {_some(self._sizes())}{self._widths()}")
        return "; ".join(reasons)

    def _sizes(self) -> list[str]:
        return [
            f"{name} changes {list(own)} where the model has {list(its)}"
            for name, (own, its) in self.other_size.items()
        ]

    def _widths(self) -> str:
        """Most layers of a transformer take its hidden size, so the pair of widths seen most often says the cause."""
        pairs = Counter((own[-1], its[-1]) for own, its in self.other_size.values() if own[-1] != its[-1])
        if not pairs:
            return ""
        own, its = pairs.most_common(1)[0][0]
        return f" (most take {own} features in the LoRA and {its} in the model)"


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
