"""Chooses a format per layer within a budget: which bytes buy the most quality.

The quality of a model is its signal to noise ratio: the squares of all its matrices (kept ones too) over the squares of
what quantization changes in them, in decibels. Noise adds up over layers as bytes do, so the choice is a knapsack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from .budget import Budget, gigabytes
from .formats import Recipe
from .knapsack import cheapest_fitting
from .measuring import LayerError, decibels_of
from .policy import OTHER_COMPONENT, Decision

__all__ = ["Allocation", "Choice", "Model", "Option", "allocate"]

# A header's length depends on the choice a little; the size is corrected until it fits.
_ROUNDS = 12


@dataclass(frozen=True)
class Option:
    """One way to store a layer, or to keep it (``decision.recipe`` None, noise 0). ``nbytes`` in the file."""

    decision: Decision
    nbytes: int
    noise: float


@dataclass(frozen=True)
class Choice:
    """A layer with everything it could have been. ``chosen`` is a place in ``options``."""

    layer: str
    signal: float
    options: tuple[Option, ...]
    chosen: int

    @property
    def option(self) -> Option:
        return self.options[self.chosen]


@dataclass
class Allocation:
    """``decisions`` of all layers in the file's order; ``choices`` of those that were measured."""

    decisions: list[Decision]
    choices: list[Choice] = field(default_factory=list)

    @property
    def signal(self) -> float:
        return sum(choice.signal for choice in self.choices)

    @property
    def noise(self) -> float:
        return sum(choice.option.noise for choice in self.choices)

    @property
    def sqnr(self) -> float:
        """Decibels over all matrices of the model."""
        return decibels_of(self.signal, self.noise)


@dataclass(frozen=True)
class Model:
    """What the choice must know of a file.

    ``decide(recipe)`` decides every layer as if this were the only format; ``fixed(layer)`` whether the user's rule
    settles its format; ``settle(decisions)`` keeps layers that detection would misread; ``measure`` gives each layer's
    error in the recipes asked for; ``size_of(decisions)`` the exact bytes of the finished file.
    """

    path: str
    decide: Callable[[Recipe], list[Decision]]
    fixed: Callable[[str], bool]
    settle: Callable[[list[Decision]], list[Decision]]
    measure: Callable[[Sequence[tuple[Decision, Sequence[Recipe]]]], dict[str, LayerError]]
    size_of: Callable[[list[Decision]], int]
    groups: Iterable[Sequence[str]] = ()
    max_error: float | None = None


def allocate(model: Model, budget: Budget) -> Allocation:
    """Within a size: the least noise. For a quality: the fewest bytes. Raises ValueError when it can't be had."""
    offered, base = _offered(model, budget)
    asked = [
        (decision, _recipes(offered.get(decision.layer, ()))) for decision in base if decision.why != OTHER_COMPONENT
    ]
    errors = model.measure(asked)
    options = {layer: _options(found, errors[layer], model.max_error) for layer, found in offered.items()}
    while True:
        groups = _grouped(options, model.groups)
        chosen = _solve(model, budget, base, errors, groups)
        decisions = [chosen.get(decision.layer, decision) for decision in base]
        settled = model.settle(decisions)
        refused = [new.layer for old, new in zip(decisions, settled, strict=True) if old.recipe != new.recipe]
        if not refused:
            break
        # Together these formats change what the file is taken for; each of them alone does not.
        for layer in refused:
            options[layer] = [option for option in options[layer] if option.decision != chosen[layer]]
    choices = [
        Choice(
            decision.layer,
            errors[decision.layer].signal,
            tuple(options.get(decision.layer) or [Option(decision, decision.bytes_after, 0.0)]),
            next((i for i, o in enumerate(options.get(decision.layer, ())) if o.decision == decision), 0),
        )
        for decision in decisions
        if decision.layer in errors
    ]
    return _explained(Allocation(decisions, choices), budget)


def _offered(model: Model, budget: Budget) -> tuple[dict[str, list[Decision]], list[Decision]]:
    """Layer -> what it could be, those alone that could be something; and the layers in order, all kept."""
    by_recipe = [model.settle(model.decide(recipe)) for recipe in budget.recipes]
    offered: dict[str, list[Decision]] = {}
    base = []
    for decisions in zip(*by_recipe, strict=True):
        possible: dict[Recipe, Decision] = {}
        why = ""
        for decision in decisions:
            if decision.recipe is None:
                continue
            problem = budget.limits.problem(decision.recipe, decision.kind)
            if problem is None:
                possible.setdefault(decision.recipe, decision)
            elif model.fixed(decision.layer):
                raise ValueError(f"layer {decision.layer!r}, {decision.why}: {problem}")
            why = why or problem or ""
        first = decisions[0]
        kept = first.kept(why or first.why)
        if possible:
            settled = model.fixed(first.layer)
            offered[first.layer] = list(possible.values()) if settled else [kept, *possible.values()]
        base.append(kept)
    return offered, base


def _recipes(decisions: Iterable[Decision]) -> list[Recipe]:
    return [decision.recipe for decision in decisions if decision.recipe is not None]


def _options(found: list[Decision], error: LayerError, limit: float | None) -> list[Option]:
    options, recipes = [], _recipes(found)
    for decision in found:
        noise = 0.0 if decision.recipe is None else error.noise[recipes.index(decision.recipe)]
        too_large = limit is not None and noise > limit * limit * error.signal and decision.recipe is not None
        if not too_large or len(found) == 1:
            options.append(Option(decision, decision.bytes_after + _header_bytes(decision), noise))
    return options


def _header_bytes(decision: Decision) -> int:
    """About what the file's header says of a quantized layer more than of one that is kept."""
    return 0 if decision.recipe is None else 330 + 4 * len(decision.layer)


# ---- layers that are chosen together ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Set:
    """Options that several layers (usually one) take together."""

    options: tuple[tuple[Option, ...], ...]

    @property
    def costs(self) -> list[tuple[int, float]]:
        return [(sum(one.nbytes for one in way), sum(one.noise for one in way)) for way in self.options]


def _grouped(options: dict[str, list[Option]], groups: Iterable[Sequence[str]]) -> list[_Set]:
    sets, done = [], set()
    for names in groups:
        by_recipe = [{one.decision.recipe: one for one in options[name]} for name in names if name in options]
        common = [recipe for recipe in by_recipe[0] if all(recipe in own for own in by_recipe)] if by_recipe else []
        if len(by_recipe) < 2 or not common:
            continue
        done.update(name for name in names if name in options)
        sets.append(_Set(tuple(tuple(own[recipe] for own in by_recipe) for recipe in common)))
    sets.extend(_Set(tuple((one,) for one in own)) for name, own in options.items() if name not in done)
    return sets


# ---- the choice ---------------------------------------------------------------------------------------------------


def _solve(
    model: Model, budget: Budget, base: list[Decision], errors: dict[str, LayerError], sets: list[_Set]
) -> dict[str, Decision]:
    """Layer -> its decision."""
    if budget.min_sqnr is not None:
        return _smallest(model, budget.min_sqnr, errors, sets)
    return _best(model, budget.target_size or 0, base, sets)


def _taken(sets: list[_Set], places: Sequence[int]) -> dict[str, Decision]:
    return {
        one.decision.layer: one.decision for own, place in zip(sets, places, strict=True) for one in own.options[place]
    }


def _smallest(model: Model, wanted: float, errors: dict[str, LayerError], sets: list[_Set]) -> dict[str, Decision]:
    signal = sum(error.signal for error in errors.values())
    # A hair below, so that the sum in another order still keeps the promise.
    limit = signal / 10 ** (wanted / 10) * (1 - 1e-9)
    places = cheapest_fitting([[(float(size), noise) for size, noise in own.costs] for own in sets], limit)
    if places is None:
        best = decibels_of(signal, sum(min(noise for _, noise in own.costs) for own in sets))
        raise ValueError(
            f"{model.path}: can't keep {wanted:g} dB: the policy's own formats reach {best:.1f} dB. "
            "Ask for less, or change its rules"
        )
    return _taken(sets, places)


def _best(model: Model, target: int, base: list[Decision], sets: list[_Set]) -> dict[str, Decision]:
    def sized(chosen: dict[str, Decision]) -> int:
        return model.size_of([chosen.get(decision.layer, decision) for decision in base])

    weights = [[(noise, float(size)) for size, noise in own.costs] for own in sets]
    best, least_noise = None, math.inf
    capacity: float | None = None
    tried = set()
    for _ in range(_ROUNDS):
        if capacity is None:
            places = [min(range(len(own)), key=lambda place: own[place][1]) for own in weights]
        else:
            places = cheapest_fitting(weights, capacity)
        if places is None or tuple(places) in tried:
            break
        tried.add(tuple(places))
        chosen = _taken(sets, places)
        size = sized(chosen)
        counted = sum(own[place][1] for own, place in zip(weights, places, strict=True))
        noise = sum(own[place][0] for own, place in zip(weights, places, strict=True))
        if capacity is None and size > target:
            raise ValueError(_too_small(model, target, size, base, chosen))
        if size <= target and noise < least_noise:
            best, least_noise = chosen, noise
        # What the header really took is known now; the same is likely for a choice nearby.
        capacity = target - (size - counted)
    return best or {}


def _too_small(model: Model, target: int, size: int, base: list[Decision], chosen: dict[str, Decision]) -> str:
    kept = sum(decision.bytes_before for decision in base if chosen.get(decision.layer, decision).recipe is None)
    formats = sorted({str(decision.recipe) for decision in chosen.values() if decision.recipe is not None})
    return (
        f"{model.path}: can't fit {gigabytes(target)}: the smallest possible is {gigabytes(size)}, in "
        f"{', '.join(formats) or 'no format at all'}; the layers that are kept take {gigabytes(kept)} of it. Ask "
        "for more, or allow smaller formats and more layers (formats, include, a policy)"
    )


# ---- why ----------------------------------------------------------------------------------------------------------


def _explained(found: Allocation, budget: Budget) -> Allocation:
    """Every decision says what its neighbours in size would have cost, and gained."""
    why = {}
    choices = []
    for choice in found.choices:
        if len(choice.options) < 2:
            choices.append(choice)
            continue
        decision = replace(choice.option.decision, why=_why(choice, found, budget))
        why[choice.layer] = decision
        options = list(choice.options)
        options[choice.chosen] = replace(choice.option, decision=decision)
        choices.append(replace(choice, options=tuple(options)))
    return Allocation([why.get(decision.layer, decision) for decision in found.decisions], choices)


def _why(choice: Choice, found: Allocation, budget: Budget) -> str:
    own = choice.option
    reasons = []
    better = [one for one in choice.options if one.noise < own.noise and one.nbytes > own.nbytes]
    smaller = [one for one in choice.options if one.noise > own.noise and one.nbytes < own.nbytes]
    for name, other in (
        ("more", min(better, key=lambda one: (one.nbytes, one.noise), default=None)),
        ("less", max(smaller, key=lambda one: (one.nbytes, -one.noise), default=None)),
    ):
        if other is None:
            continue
        after = decibels_of(found.signal, found.noise - own.noise + other.noise)
        change = after - found.sqnr
        label = str(other.decision.recipe) if other.decision.recipe else f"keeping {other.decision.dtype}"
        effect = f"{change:+.3f} dB" if math.isfinite(change) else f"{after:.1f} dB" if after < math.inf else "no error"
        reasons.append(f"{label} takes {gigabytes(abs(other.nbytes - own.nbytes))} {name} ({effect})")
    ground = choice.option.decision.why if own.decision.recipe else f"kept within the budget, {budget}"
    return "; ".join([ground, *reasons])
