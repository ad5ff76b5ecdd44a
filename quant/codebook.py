"""The codebook of asym_w4a8_int8 for weights too large to quantize in one go.

comfy_kitchen chooses it from random samples of the whole rotated weight. Here the same samples are gathered run by
run, so that a weight of any size gets the very table that comfy_kitchen would choose (a test compares them).
"""

from __future__ import annotations

import torch

from .formats import Recipe
from .rotation import rotated
from .stream import RowRun

__all__ = ["CodebookSampler"]

# comfy_kitchen 0.2.31 to 0.2.40: samples for the kurtosis test, its threshold, samples and rounds of the fit.
_TEST_SAMPLES = 1 << 19
_TEST_THRESHOLD = -0.1
_FIT_SAMPLES = 300_000
_FIT_ROUNDS = 25
_LEVELS = 16
# Its table for weights that are normal within groups; versions before 0.2.40 have it under no public name.
_NORMAL_LEVELS = (
    -0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720,
    0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671,
)  # fmt: skip


def _sample_positions(count: int, samples: int) -> torch.Tensor | None:
    """Positions in the flattened weight, in comfy_kitchen's order; None when all are taken."""
    if count <= samples:
        return None
    return torch.randint(0, count, (samples,), generator=torch.Generator().manual_seed(0))


class _Gather:
    def __init__(self, count: int, samples: int):
        positions = _sample_positions(count, samples)
        self.values = torch.empty(count if positions is None else samples)
        self._sorted, self._order = (None, None) if positions is None else positions.sort()

    def add(self, flat: torch.Tensor, offset: int) -> None:
        if self._sorted is None:
            self.values[offset : offset + flat.numel()] = flat
            return
        bounds = torch.tensor([offset, offset + flat.numel()])
        first, last = torch.searchsorted(self._sorted, bounds).tolist()
        self.values[self._order[first:last]] = flat[self._sorted[first:last] - offset]


class CodebookSampler:
    """Feed it every run of one matrix, then ask it for the codebook: sixteen values in float32."""

    def __init__(self, shape: tuple[int, int], recipe: Recipe):
        self._columns = shape[1]
        self._recipe = recipe
        self._test = _Gather(shape[0] * shape[1], _TEST_SAMPLES)
        self._fit = _Gather(shape[0] * shape[1], _FIT_SAMPLES)

    def add(self, run: RowRun, weight: torch.Tensor) -> None:
        turned = rotated(weight.contiguous(), self._recipe.convrot_groupsize).float()
        grouped = turned.view(weight.shape[0], -1, self._recipe.group_size)
        normalized = grouped / grouped.abs().amax(dim=-1, keepdim=True).clamp(min=1e-8)
        flat = normalized.reshape(-1).cpu()
        self._test.add(flat, run.start * self._columns)
        self._fit.add(flat, run.start * self._columns)

    def codebook(self) -> torch.Tensor:
        samples = self._test.values
        kurtosis = ((samples - samples.mean()) / (samples.std() + 1e-9)).pow(4).mean() - 3.0
        if float(kurtosis) <= _TEST_THRESHOLD:
            return torch.tensor(_NORMAL_LEVELS)
        return _lloyd_max(self._fit.values)


def _lloyd_max(samples: torch.Tensor) -> torch.Tensor:
    """Sixteen levels with the least squared error: quantiles, then rounds of assign and average."""
    levels = torch.quantile(samples, torch.linspace(0, 1, _LEVELS))
    for _ in range(_FIT_ROUNDS):
        nearest = (samples.unsqueeze(-1) - levels).abs().argmin(-1)
        moved = levels.clone()
        for index in range(_LEVELS):
            chosen = nearest == index
            if chosen.any():
                moved[index] = samples[chosen].mean()
        levels = moved
    return levels.contiguous()
