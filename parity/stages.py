"""Two implementations on the same inputs, stage by stage, in the order of execution."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from .build import cast
from .capture import run_tapped
from .measure import cosine, max_abs_error, non_finite, relative_error
from .port import Inputs, Port, Stage

__all__ = ["StageResult", "compare_with_ours", "compare_with_recording", "compare_with_reference"]

# Two correct float32 implementations are about 1e-6 apart.
FLOOR = 2e-6
# What is allowed where rounding can't be measured.
PLAIN = 1e-5
# The same for dtypes of two or three digits.
LOW_PRECISION = 0.1
# Rounding is measured by running the reference in a wider dtype beside; above so many weights that is left out.
MEASURED = 100_000_000
_WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclass(frozen=True)
class StageResult:
    """One row. ``relative_error``, ``max_abs`` and ``cosine`` are those of the elements finite on both sides;
    ``allowed``: how large the relative error may be; ``problem``: a reason to differ that is no number."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    other_dtype: str
    cosine: float
    relative_error: float
    max_abs: float
    allowed: float
    non_finite: int
    other_non_finite: int
    problem: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.problem) or not self.relative_error <= self.allowed


def compare_with_reference(
    port: Port,
    ours: torch.nn.Module,
    reference: torch.nn.Module,
    inputs: Inputs,
    *,
    dtype: torch.dtype = torch.float32,
    only: tuple[str, ...] = (),
) -> list[StageResult]:
    """Both modules computed in ``dtype``. A stage may differ by what rounding costs the reference itself, times three.

    only: patterns of stage names, none = all. The stages are in our order of execution.
    """
    stages = _chosen(port.stages_of(ours), only)
    given = cast(inputs, dtype)
    mine = run_tapped(ours, {stage.name: stage.ours for stage in stages}, lambda: port.run_ours(ours, given))
    taps = {stage.name: stage.reference or stage.ours for stage in stages}
    theirs = run_tapped(reference, taps, lambda: port.run_reference(reference, given))
    allowed = {} if dtype == torch.float32 else dict.fromkeys(taps, LOW_PRECISION)
    if sum(parameter.numel() for parameter in reference.parameters()) <= MEASURED:
        wide = torch.nn.Module.to(copy.deepcopy(reference), _WIDER[dtype])
        exact = {k: v.to(_WIDER[dtype]) if v.is_floating_point() else v for k, v in given.items()}
        wider = run_tapped(wide, taps, lambda: port.run_reference(wide, exact))
        noise = {name: _error(theirs[name], wider[name]) for name in theirs if name in wider}
        allowed |= {name: max(FLOOR, 3 * value) for name, value in noise.items() if math.isfinite(value)}
    return _results(stages, mine, theirs, inputs, allowed)


def compare_with_ours(
    port: Port,
    ours: torch.nn.Module,
    other: torch.nn.Module,
    inputs: Inputs,
    *,
    dtype: torch.dtype = torch.float32,
    only: tuple[str, ...] = (),
) -> list[StageResult]:
    """Two modules of ours: other weights, a quantized model and its original."""
    stages = _chosen(port.stages_of(ours), only)
    given, taps = cast(inputs, dtype), {stage.name: stage.ours for stage in stages}
    results = [run_tapped(module, taps, lambda module=module: port.run_ours(module, given)) for module in (ours, other)]
    limit = PLAIN if dtype == torch.float32 else LOW_PRECISION
    return _results(stages, *results, inputs, {stage.name: limit for stage in stages})


def compare_with_recording(
    port: Port,
    ours: torch.nn.Module,
    recorded: Mapping[str, torch.Tensor],
    inputs: Inputs,
    *,
    dtype: torch.dtype = torch.float32,
    allowed: float = PLAIN,
    only: tuple[str, ...] = (),
) -> list[StageResult]:
    """Ours beside a fixture's tensors: stages under their recorded names, and "output"."""
    available = {name: how.of(recorded) for name, how in port.recorded.items()} | {"output": recorded.get("output")}
    theirs = {name: value for name, value in available.items() if value is not None}
    stages = [stage for stage in _chosen(port.stages_of(ours), only) if stage.name in theirs]
    given = cast(inputs, dtype)
    mine = run_tapped(ours, {stage.name: stage.ours for stage in stages}, lambda: port.run_ours(ours, given))
    return _results(stages, mine, theirs, inputs, dict.fromkeys(theirs, allowed))


def _chosen(stages: list[Stage], only: tuple[str, ...]) -> list[Stage]:
    chosen = [stage for stage in stages if not only or any(fnmatchcase(stage.name, pattern) for pattern in only)]
    if not chosen:
        names = ", ".join(stage.name for stage in stages)
        raise ValueError(f"no stage is called {' or '.join(only)}; there are {names}")
    return chosen


def _results(
    stages: list[Stage],
    mine: Mapping[str, torch.Tensor],
    theirs: Mapping[str, torch.Tensor],
    inputs: Inputs,
    allowed: Mapping[str, float],
) -> list[StageResult]:
    by_name = {stage.name: stage for stage in stages}
    order = [*mine, *(name for name in by_name if name not in mine)]
    rows = []
    for name in order:
        limit = allowed.get(name, PLAIN)
        if name in mine and name in theirs:
            compared = by_name[name].compared or (lambda value, inputs: value)
            rows.append(_row(name, compared(mine[name], inputs), compared(theirs[name], inputs), limit))
        elif name in mine or name in theirs:
            rows.append(_absent(name, mine.get(name), theirs.get(name), limit))
    return rows


def _row(name: str, value: torch.Tensor, other: torch.Tensor, allowed: float) -> StageResult:
    problem, both = "", None
    if name.endswith(".mask"):
        value, other = torch.broadcast_tensors(value, other)
    if value.shape != other.shape:
        problem = f"shape {list(value.shape)}, the other {list(other.shape)}"
    elif value.is_floating_point():
        both = value.isfinite() & other.isfinite()
        # In float16 rounding decides what overflows at the very edge.
        if float((value.isfinite() != other.isfinite()).float().mean()) > allowed:
            problem = "not finite in different places"
    measured = both is not None or not problem
    if both is not None and not bool(both.all()):
        a, b = value[both], other[both]
    else:
        a, b = value, other
    return StageResult(
        name=name,
        shape=tuple(value.shape),
        dtype=_name(value),
        other_dtype=_name(other),
        cosine=cosine(a, b) if measured else math.nan,
        relative_error=relative_error(a, b) if measured else math.inf,
        max_abs=max_abs_error(a, b) if measured else math.inf,
        allowed=allowed,
        non_finite=non_finite(value),
        other_non_finite=non_finite(other),
        problem=problem,
    )


def _absent(name: str, value: torch.Tensor | None, other: torch.Tensor | None, allowed: float) -> StageResult:
    there = value if value is not None else other
    return StageResult(
        name=name,
        shape=tuple(there.shape),
        dtype="" if value is None else _name(value),
        other_dtype="" if other is None else _name(other),
        cosine=math.nan,
        relative_error=math.inf,
        max_abs=math.inf,
        allowed=allowed,
        non_finite=0 if value is None else non_finite(value),
        other_non_finite=0 if other is None else non_finite(other),
        problem=f"only {'the other' if value is None else 'the first'} computes it",
    )


def _name(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return relative_error(value, exact) if value.shape == exact.shape else math.inf
