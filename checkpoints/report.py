"""What a conversion did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ConversionReport:
    """kind: "diffusion_model", "text_encoder", "autoencoder" or "checkpoint"; tensors: of the result; left_out: keys of
    the source that the result does not need; notes: for people."""

    source: str
    destination: str
    kind: str
    architecture: str
    layout: str
    tensors: int
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.destination}: {self.architecture} in {self.layout} layout, {self.tensors} tensors"
        if self.left_out:
            text += f"; {len(self.left_out)} left out ({', '.join(self.left_out[:3])})"
        return text
