"""How a layer's codes are made beyond what its format says: in which arithmetic, rounded how, calibrated by what."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .calibration import Calibration, Inputs, read_calibration
from .errors import QuantError
from .formats import Recipe
from .policy import Decision
from .quantizer import Quantizer, Rows, compute_dtype
from .rounding import ROUNDING, Rounding, best_stretch, improves
from .smoothing import input_scale, pre_quant_scale
from .stream import RowRun, Task, Writing

__all__ = ["COMPUTE", "PLAIN", "Craft"]

COMPUTE = ("stored", "float32")
_SAMPLE_ROWS = 128


@dataclass(frozen=True)
class Craft:
    """What may be done for a layer beyond its recipe. Raises ValueError for an unknown arithmetic, and for smoothing
    without a calibration."""

    # "stored": in the weight's own dtype, which gives ComfyUI's bytes; "float32": a little more exact.
    compute: str = COMPUTE[0]
    # Writes `input_scale` where the format has one.
    calibration: Calibration | None = None
    # By the calibration, the `pre_quant_scale` of nvfp4 too.
    smooth: bool = False
    # How weights become codes; None for one by one.
    rounding: Rounding | None = None

    def __post_init__(self) -> None:
        if self.compute not in COMPUTE:
            raise ValueError(f"compute {self.compute!r} does not exist ({', '.join(COMPUTE)})")
        if self.smooth and self.calibration is None:
            raise ValueError("smoothing needs statistics of what the layers are given: choose a calibration too")

    @classmethod
    def of(cls, statistics: str | os.PathLike | None, rounding: str, smooth: bool) -> Craft:
        """As nodes ask: a file of statistics or None, a way of rounding by its name. Raises FileError, ValueError."""
        calibration = None if statistics is None else read_calibration(statistics)
        return cls(calibration=calibration, smooth=smooth, rounding=None if rounding == ROUNDING[0] else Rounding())

    def powers(self, names: Iterable[str]) -> dict[str, torch.Tensor] | None:
        """By which errors are weighted: `Calibration.powers` of a source's tensors, None without statistics."""
        if self.calibration is None:
            return None
        return self.calibration.powers(name.removesuffix(".weight") for name in names)

    def dtype(self, stored: str) -> torch.dtype:
        return torch.float32 if self.compute == "float32" else compute_dtype(stored)

    def inputs(self, decision: Decision) -> Inputs | None:
        """The statistics of a layer that is to be quantized; expert banks and embeddings have none."""
        if self.calibration is None or decision.recipe is None or decision.kind != "linear":
            return None
        return self.calibration.of(decision.layer, decision.shape[-1])

    def check(self, decisions: list[Decision]) -> list[str]:
        """Sentences on layers without statistics. Raises QuantError when no layer has any."""
        if self.calibration is None:
            return []
        linear = [decision for decision in decisions if decision.recipe is not None and decision.kind == "linear"]
        without = [decision.layer for decision in linear if self.inputs(decision) is None]
        if linear and len(without) == len(linear):
            raise QuantError(
                self.calibration.path,
                f"knows none of the layers that are quantized (it has {next(iter(self.calibration.layers))!r}, the "
                f"file has {without[0]!r}): it was made with another model, or with one of another layout",
            )
        return [f"{len(without)} layers have no statistics, {without[0]!r} first: they did not run"] if without else []

    def recipe(self, decision: Decision) -> Recipe:
        """With a calibrated input scale, float8 products are safe: nothing asks ComfyUI to avoid them any more."""
        if self.inputs(decision) is None or not decision.recipe.format.startswith("float8"):
            return decision.recipe
        return replace(decision.recipe, full_precision=False)

    def quantizer(self, rows: Rows, decision: Decision, device: torch.device, record: dict[str, Any]) -> Quantizer:
        recipe, inputs = self.recipe(decision), self.inputs(decision)
        rounding = self.rounding if improves(recipe) else None
        if inputs is None and rounding is None:
            return Quantizer(rows, decision.layer, recipe, device, record)
        smooth = self.smooth and recipe.format == "nvfp4" and inputs is not None
        return _Crafted(rows, decision.layer, recipe, device, record, inputs, smooth, rounding)


PLAIN = Craft()


@dataclass(frozen=True)
class _Divided(Rows):
    """Rows whose columns are divided by powers of two, which is exact in every float type."""

    scale: torch.Tensor | None = None

    def load(self, run: RowRun, room: torch.Tensor | None = None) -> torch.Tensor:
        return super().load(run, room).to(self.dtype) / self.scale.to(self.dtype)


class _Crafted(Quantizer):
    """``inputs``: what the layer was given, for its input scale, its smoothing and its rounding; None for unknown."""

    def __init__(
        self, rows, layer, recipe, device, record, inputs: Inputs | None, smooth: bool, rounding: Rounding | None
    ):
        super().__init__(rows, layer, recipe, device, record)
        self.inputs = inputs
        self.smooth = smooth
        self.rounding = rounding
        self.power = None if inputs is None else inputs.power
        self.scaled = inputs is not None and input_scale(recipe, inputs.amax.amax()) is not None
        if self.scaled:
            self.entries = {**self.entries, "input_scale": ("F32", ())}
        if smooth:
            self.entries["pre_quant_scale"] = ("BF16", (rows.shape[-1],))

    def step(self, writing: Writing) -> Iterator[Task]:
        amax = None if self.inputs is None else self.inputs.amax
        if self.smooth:
            scale = pre_quant_scale(self._sample(), self.inputs)
            writing.put(f"{self.layer}.pre_quant_scale", scale.to(torch.bfloat16))
            rows = self.rows
            self.rows = _Divided(rows.source, rows.key, rows.shape, rows.dtype, rows.quantized, scale)
            amax, self.power = amax * scale, self.power * scale.square()
        if self.scaled:
            writing.put(f"{self.layer}.input_scale", input_scale(self.recipe, amax.amax()))
        yield from super().step(writing)

    def scale_of(self, amax: torch.Tensor) -> torch.Tensor | None:
        scale = super().scale_of(amax)
        if self.rounding is None or not self.recipe.format.startswith("float8"):
            return scale
        return scale * best_stretch(self._sample(), self.recipe, scale.cpu(), self.power)

    def codes_of(
        self, weight: torch.Tensor, scale: torch.Tensor | None, codebook: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        if self.rounding is None:
            return super().codes_of(weight, scale, codebook)
        return self.rounding.codes(weight, self.recipe, scale, self.power)

    def _sample(self) -> torch.Tensor:
        """The first and the middle rows."""
        rows = self.rows.shape[-2]
        starts = [0] if rows <= 2 * _SAMPLE_ROWS else [0, rows // 2 // _SAMPLE_ROWS * _SAMPLE_ROWS]
        return torch.cat([self.rows.load(RowRun(start, min(start + _SAMPLE_ROWS, rows))) for start in starts])
