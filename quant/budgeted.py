"""A file's layers within a budget, or measured as they were decided: what quantize does before it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..files import Source
from .allocation import Allocation, Choice, Model, Option, allocate
from .budget import Budget
from .formats import Recipe
from .layer import Layer
from .measuring import LayerError, measure_layers, measured_bytes
from .policy import OTHER_COMPONENT, PREFIXES, Decision, Policy, matches
from .stream import Meter, Progress

__all__ = ["Phases", "decide_within", "measured_decisions", "plan_as_policy", "summary_format"]


class Phases:
    """One progress for two passes over a file: measuring, then writing."""

    def __init__(self, progress: Progress | None, measuring: int, writing: int):
        self._progress, self._measuring, self._writing = progress, measuring, writing

    def measure(self) -> Meter:
        return Meter(self._measuring, None if self._progress is None else self._first)

    def write(self, total: int) -> Meter:
        def second(done: int, known_total: int, label: str) -> None:
            scaled = self._writing * done // max(total, 1)
            self._progress(self._measuring + scaled, self._measuring + self._writing, label)

        return Meter(total, None if self._progress is None else second)

    def _first(self, done: int, known_total: int, label: str) -> None:
        self._progress(done, self._measuring + self._writing, f"measuring {label}")


def decide_within(
    source: Source,
    plan: Policy,
    budget: Budget,
    *,
    decide: Callable[[Policy], list[Decision]],
    settle: Callable[[list[Decision]], list[Decision]],
    size_of: Callable[[list[Decision]], int],
    layers: Mapping[str, Layer],
    device: torch.device,
    progress: Progress | None = None,
    input_power: Mapping[str, torch.Tensor] | None = None,
    groups: Iterable[Sequence[str]] = (),
) -> tuple[Allocation, Phases]:
    """``decide`` decides by a policy, ``settle`` keeps what detection would misread. Raises ValueError, QuantError."""
    phases = Phases(None, 0, 0)

    def measure(asked: Sequence[tuple[Decision, Sequence[Recipe]]]) -> dict[str, LayerError]:
        nonlocal phases
        total = sum(measured_bytes(decision, decision.key in layers) for decision, _ in asked)
        phases = Phases(progress, total, sum(info.nbytes for info in source.tensors.values()))
        return measure_layers(source, asked, layers, device, phases.measure(), input_power)

    def fixed(layer: str) -> bool:
        rule = next((rule for rule in plan.rules if matches(rule.match, layer)), None)
        return rule is not None and rule.recipe is not None

    model = Model(
        source.path,
        lambda recipe: decide(replace(plan, recipe=recipe, max_error=None)),
        fixed,
        settle,
        measure,
        size_of,
        groups,
        plan.max_error,
    )
    return allocate(model, budget), phases


def measured_decisions(
    source: Source,
    decisions: list[Decision],
    *,
    layers: Mapping[str, Layer],
    device: torch.device,
    progress: Progress | None = None,
    input_power: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Allocation, Phases]:
    """The error of what was decided without a budget."""
    asked = [
        (decision, [decision.recipe] if decision.recipe is not None else [])
        for decision in decisions
        if decision.why != OTHER_COMPONENT
    ]
    total = sum(measured_bytes(decision, decision.key in layers) for decision, _ in asked)
    phases = Phases(progress, total, sum(info.nbytes for info in source.tensors.values()))
    errors = measure_layers(source, asked, layers, device, phases.measure(), input_power)
    choices = []
    for decision, _ in asked:
        error = errors[decision.layer]
        option = Option(decision, decision.bytes_after, error.noise[0] if error.noise else 0.0)
        choices.append(Choice(decision.layer, error.signal, (option,), 0))
    return Allocation(decisions, choices), phases


def summary_format(decisions: Iterable[Decision]) -> str:
    """The recipes in use, the most frequent first."""
    counts = Counter(str(decision.recipe) for decision in decisions if decision.recipe is not None)
    return ", ".join(recipe for recipe, _ in counts.most_common()) or "as stored"


def plan_as_policy(decisions: Iterable[Decision]) -> dict[str, Any]:
    """The choice as a policy that gives it again (see `policy.read_policy`): layers by format, all others kept."""
    by_recipe: dict[str, list[str]] = {}
    for decision in decisions:
        if decision.recipe is not None:
            by_recipe.setdefault(str(decision.recipe), []).append(_glob(decision.layer))
    tables: list[dict[str, Any]] = [{"match": names, "format": recipe} for recipe, names in by_recipe.items()]
    most = max(by_recipe, key=lambda recipe: len(by_recipe[recipe]), default="int8_convrot")
    return {"format": most, "layers": [*tables, {"match": "*", "format": "keep"}]}


def _glob(layer: str) -> str:
    """A pattern for this layer alone, whether or not a file has the prefix."""
    bare = next((layer[len(prefix) :] for prefix in PREFIXES[:1] if layer.startswith(prefix)), layer)
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in bare)
