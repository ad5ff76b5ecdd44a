"""One option per group, the cheapest whose weights fit: the multiple-choice knapsack problem.

Exact for small cases. For large ones the number of partial solutions is bounded, and the result is at most a thousandth
or so from the optimum: many small layers leave little to gain by clever packing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["cheapest_fitting"]

# Partial solutions that are kept at once; beyond it the cheapest of each narrow range of weights stays.
_MOST_STATES = 20_000

Group = Sequence[tuple[float, float]]


@dataclass
class _Group:
    """The options of a group that no other beats, lightest first; ``index`` as they were given."""

    index: np.ndarray
    cost: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, options: Group) -> _Group:
        order = sorted(range(len(options)), key=lambda place: (options[place][1], options[place][0], place))
        kept: list[int] = []
        for place in order:
            if not kept or options[place][0] < options[kept[-1]][0]:
                kept.append(place)
        costs = np.array([options[place][0] for place in kept], dtype=np.float64)
        return cls(np.array(kept), costs, np.array([options[place][1] for place in kept], dtype=np.float64))

    def hull(self) -> list[int]:
        """Places on the lower convex hull of cost over weight."""
        hull: list[int] = []
        for place in range(len(self.index)):
            while len(hull) > 1 and self._slope(hull[-2], hull[-1]) >= self._slope(hull[-1], place):
                hull.pop()
            hull.append(place)
        return hull

    def _slope(self, first: int, second: int) -> float:
        return float((self.cost[second] - self.cost[first]) / (self.weight[second] - self.weight[first]))

    def only(self, keep: np.ndarray) -> _Group:
        return _Group(self.index[keep], self.cost[keep], self.weight[keep])


def cheapest_fitting(groups: Sequence[Group], capacity: float) -> list[int] | None:
    """For each group the place of its chosen option: least total cost among those of total weight <= ``capacity``.

    ``groups`` of (cost, weight), both >= 0. None when even the lightest options are too heavy. Equal input gives equal
    output.
    """
    pruned = [_Group.of(options) for options in groups]
    lightest = sum(float(group.weight[0]) for group in pruned)
    if lightest > capacity:
        return None
    levels, price = _greedy(pruned, capacity - lightest)
    costs, bound = _value(pruned, levels), _bound(pruned, price, capacity)
    room = costs - bound
    slack = 1e-12 * max(abs(costs), 1.0) + max(room, 0.0)
    # An option whose price is worse than the group's best by more than the gap is in no better solution.
    left = []
    for group in pruned:
        priced = group.cost + price * group.weight
        left.append(group.only(priced - priced.min() <= slack))
    better = _search(left, price, capacity, costs)
    if better is not None:
        return [int(group.index[level]) for group, level in zip(left, better, strict=True)]
    return [int(group.index[level]) for group, level in zip(pruned, levels, strict=True)]


def _value(groups: Sequence[_Group], levels: Sequence[int]) -> float:
    return sum(float(group.cost[level]) for group, level in zip(groups, levels, strict=True))


def _bound(groups: Sequence[_Group], price: float, capacity: float) -> float:
    """No solution that fits costs less (Lagrange)."""
    return sum(float((group.cost + price * group.weight).min()) for group in groups) - price * capacity


def _greedy(groups: Sequence[_Group], room: float) -> tuple[list[int], float]:
    """Steps along each group's hull, those that save the most per weight first; and what a unit of weight is worth."""
    steps = []
    for number, group in enumerate(groups):
        hull = group.hull()
        for before, after in itertools.pairwise(hull):
            weight = float(group.weight[after] - group.weight[before])
            steps.append((-float(group.cost[before] - group.cost[after]) / weight, number, before, after, weight))
    levels, price = [0] * len(groups), None
    for slope, number, before, after, weight in sorted(steps):
        if levels[number] != before:
            continue
        if weight <= room:
            levels[number], room = after, room - weight
        elif price is None:
            price = -slope
    return levels, price or 0.0


def _search(groups: Sequence[_Group], price: float, capacity: float, limit: float) -> list[int] | None:
    """The best of what is left to decide, or None when nothing beats ``limit``."""
    rest = [float((group.cost + price * group.weight).min()) for group in groups]
    light = [float(group.weight[0]) for group in groups]
    rest_price, rest_light = sum(rest), sum(light)
    costs, weights = np.zeros(1), np.zeros(1)
    history: list[tuple[np.ndarray, np.ndarray]] = []
    slack = 1e-12 * max(abs(limit), 1.0)
    for group, own_price, own_light in zip(groups, rest, light, strict=True):
        rest_price, rest_light = rest_price - own_price, rest_light - own_light
        all_costs = (costs[:, None] + group.cost[None, :]).ravel()
        all_weights = (weights[:, None] + group.weight[None, :]).ravel()
        hopeful = all_weights + rest_light <= capacity * (1 + 1e-15)
        hopeful &= all_costs + price * all_weights + rest_price - price * capacity <= limit + slack
        places = np.flatnonzero(hopeful)
        places = places[np.lexsort((all_costs[places], all_weights[places]))]
        if not len(places):
            return None
        best = np.minimum.accumulate(all_costs[places])
        first = np.concatenate(([True], best[1:] < best[:-1]))
        places = places[first]
        if len(places) > _MOST_STATES:
            places = _thinned(places, all_weights[places])
        history.append((places // len(group.index), places % len(group.index)))
        costs, weights = all_costs[places], all_weights[places]
    fitting = np.flatnonzero(weights <= capacity)
    if not len(fitting):
        return None
    state = int(fitting[costs[fitting].argmin()])
    if costs[state] >= limit:
        return None
    levels = []
    for parents, options in reversed(history):
        levels.append(int(options[state]))
        state = int(parents[state])
    return levels[::-1]


def _thinned(places: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The cheapest (which is the heaviest) and the lightest of each range of weights."""
    low, high = float(weights[0]), float(weights[-1])
    bins = ((weights - low) / max(high - low, 1e-300) * (_MOST_STATES // 2 - 1)).astype(np.int64)
    edge = np.concatenate(([True], bins[1:] != bins[:-1]))
    last = np.concatenate((bins[1:] != bins[:-1], [True]))
    return places[edge | last]
