"""What a comparison found, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from ..supported_models import Architecture
from .sampling import SamplingResult
from .schedule import ScheduleResult
from .stages import StageResult
from .weights import WeightResult

__all__ = ["Report"]

# Weights shown one by one; the rest is counted.
SHOWN = 20


@dataclass
class Report:
    """first: ours; second: what it is held against. stages in the order of execution; parts not compared are None."""

    first: str
    second: str
    card: Architecture
    dtype: str
    seed: int
    stages: list[StageResult] | None = None
    weights: list[WeightResult] | None = None
    schedule: ScheduleResult | None = None
    sampling: SamplingResult | None = None

    @property
    def first_difference(self) -> StageResult | None:
        """The first stage of the execution that differs by more than rounding."""
        return next((stage for stage in self.stages or () if stage.differs), None)

    @property
    def first_non_finite(self) -> StageResult | None:
        """The first stage that is infinite or not a number somewhere, on either side."""
        return next((stage for stage in self.stages or () if stage.non_finite or stage.other_non_finite), None)

    @property
    def network_differs(self) -> bool:
        return self.first_difference is not None or (self.sampling is not None and self.sampling.differs)

    def verdict(self) -> list[str]:
        """The findings in sentences; network, numbers and schedule apart."""
        found = []
        if self.stages is not None:
            difference = self.first_difference
            if difference is None:
                found.append(f"network: every stage agrees ({len(self.stages)} compared)")
            else:
                later = sum(stage.differs for stage in self.stages) - 1
                found.append(f"first stage that differs: {difference.name} ({_why(difference)}); {later} more follow")
        if (bad := self.first_non_finite) is not None:
            found.append(
                f"first non-finite tensor: {bad.name} ({bad.non_finite} elements, {bad.other_non_finite} in the other)"
            )
        if self.weights is not None:
            found.append(self._weights_verdict())
        if self.sampling is not None:
            found += self._sampling_verdict()
        if self.schedule is not None:
            differences = self.schedule.differences
            found.append("schedule: differs, not the network" if differences else "schedule and prompts: agree")
            found += [f"  {line}" for line in differences]
        return found

    def _weights_verdict(self) -> str:
        differing = [weight for weight in self.weights if weight.differs]
        if not differing:
            return f"weights: all {len(self.weights)} are equal"
        worst = max(differing, key=lambda weight: (bool(weight.problem), weight.relative_error))
        why = worst.problem or f"rel. err {worst.relative_error:.1e}, SQNR {worst.sqnr:.1f} dB"
        return f"weights: {len(differing)} of {len(self.weights)} differ, most {worst.name} ({why})"

    def _sampling_verdict(self) -> list[str]:
        run, last = self.sampling, self.sampling.steps[-1]
        if run.differs:
            step = next(i for i, error in enumerate(run.steps) if not error <= run.allowed)
            return [f"sampling: same noise and sigmas, and step {step + 1} differs (rel. err {run.steps[step]:.1e})"]
        found = [f"sampling: with the same noise and sigmas {len(run.steps)} steps agree (rel. err {last:.1e})"]
        if run.schedule_differs:
            found.append(f"  with the pipeline's own sigmas the results are {run.own:.1e} apart: it is the schedule")
        return found

    def text(self) -> str:
        lines = [f"{self.card.title}: {self.first} beside {self.second}, {self.dtype}, seed {self.seed}"]
        if self.stages is not None:
            lines += ["", *_stage_table(self.stages)]
        if self.weights is not None:
            lines += ["", *_weight_table(self.weights)]
        return "\n".join([*lines, "", *self.verdict()])

    def json(self) -> str:
        first, bad = self.first_difference, self.first_non_finite
        return json.dumps(
            {
                "architecture": self.card.name,
                "first": self.first,
                "second": self.second,
                "dtype": self.dtype,
                "seed": self.seed,
                "first_stage_that_differs": first and first.name,
                "first_non_finite": bad and bad.name,
                "stages": _plain([_with(stage, differs=stage.differs) for stage in self.stages or ()]),
                "weights": self.weights and _plain([_with(weight) for weight in self.weights]),
                "schedule": self.schedule and _plain(_with(self.schedule, differences=self.schedule.differences)),
                "sampling": self.sampling and _plain(_with(self.sampling)),
            },
            indent=2,
        )


def _with(row: Any, **more: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(row), **more}


def _plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _why(stage: StageResult) -> str:
    return stage.problem or f"rel. err {stage.relative_error:.1e}, allowed {stage.allowed:.1e}"


def _stage_table(stages: list[StageResult]) -> list[str]:
    rows = [("stage", "shape", "dtype", "cosine", "rel. err", "max abs", "")]
    for stage in stages:
        dtype = stage.dtype if stage.dtype == stage.other_dtype else f"{stage.dtype or '-'}/{stage.other_dtype or '-'}"
        notes = [_why(stage)] if stage.differs else []
        if stage.non_finite or stage.other_non_finite:
            notes.append(f"not finite: {stage.non_finite}, other {stage.other_non_finite}")
        numbers = (f"{stage.cosine:.7f}", f"{stage.relative_error:.1e}", f"{stage.max_abs:.1e}")
        note = f"<- {'; '.join(notes)}" if notes else ""
        rows.append((stage.name, "x".join(map(str, stage.shape)), dtype, *numbers, note))
    return _table(rows)


def _weight_table(weights: list[WeightResult]) -> list[str]:
    differing = sorted((weight for weight in weights if weight.differs), key=lambda weight: -weight.relative_error)
    if not differing:
        return ["no weight differs"]
    rows = [("weight", "shape", "stored", "other", "rel. err", "SQNR dB", "")]
    for weight in differing[:SHOWN]:
        numbers = (f"{weight.relative_error:.1e}", f"{weight.sqnr:.1f}")
        shape = "x".join(map(str, weight.shape))
        rows.append((weight.name, shape, weight.stored, weight.other_stored, *numbers, weight.problem))
    rest = len(differing) - SHOWN
    return _table(rows) + ([f"... and {rest} more, each nearer (--json lists all)"] if rest > 0 else [])


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
