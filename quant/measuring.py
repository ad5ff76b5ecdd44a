"""What every allowed format changes in each layer: all are measured while a piece of the weight is in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..files import Source
from .codebook import CodebookSampler
from .errors import QuantError
from .formats import Recipe
from .kitchen import dequantize_matrix, has_tensor_scale, quantize_matrix, tensor_scale
from .layer import Layer
from .policy import Decision
from .quantizer import Rows, compute_dtype
from .stream import Meter, RowRun, Task, run_tasks

# Weights quantized at once; bounds the temporaries.
_BATCH = 1 << 20

__all__ = ["LayerError", "decibels_of", "measure_layers", "measured_bytes"]


@dataclass(frozen=True)
class LayerError:
    """``signal``: sum of squares of a weight; ``noise``: of what each recipe changes in it, in the recipes' order.
    With the power of each input channel given, both are weighted by it: then they speak of the layer's output."""

    signal: float
    noise: tuple[float, ...] = ()


def decibels_of(signal: float, noise: float) -> float:
    """Signal to noise ratio; infinite when nothing is changed."""
    if noise <= 0.0:
        return math.inf
    return -math.inf if signal <= 0.0 else 10.0 * math.log10(signal / noise)


def measured_bytes(decision: Decision, quantized: bool) -> int:
    """What `measure_layers` reports as progress for this layer."""
    return math.prod(decision.shape) * compute_dtype("BF16" if quantized else decision.dtype).itemsize


def measure_layers(
    source: Source,
    asked: Sequence[tuple[Decision, Sequence[Recipe]]],
    layers: Mapping[str, Layer],
    device: torch.device,
    meter: Meter,
    input_power: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, LayerError]:
    """Layer -> its error in each of the recipes asked for (none: its signal alone), over all rows.

    ``layers``: those that are quantized already, by weight key. ``input_power``: layer -> mean square of each input
    channel [K]; a layer without it is taken to have the mean of the others everywhere. Raises QuantError for NaN.
    """
    powers = input_power or {}
    known = [float(power.double().mean()) for power in powers.values()]
    usual = sum(known) / len(known) if known else 1.0
    found: dict[str, LayerError] = {}

    def tasks() -> Iterator[Task]:
        for decision, recipes in asked:
            layer = layers.get(decision.key)
            dtype = compute_dtype("BF16" if layer is not None else decision.dtype)
            rows = Rows(source, decision.key, decision.shape, dtype, layer)
            channels = powers.get(decision.layer)
            if channels is not None and channels.numel() != decision.shape[-1]:
                raise ValueError(
                    f"the calibration has {channels.numel()} input channels for layer {decision.layer!r}, which has "
                    f"{decision.shape[-1]}: it was made with another model"
                )
            measuring = _Layer(rows, decision, recipes, device, channels, usual)
            yield from measuring.tasks(lambda error, name=decision.layer: found.__setitem__(name, error))

    run_tasks(tasks(), meter)
    return found


class _Layer:
    """All recipes of one weight, fed run by run."""

    def __init__(
        self,
        rows: Rows,
        decision: Decision,
        recipes: Sequence[Recipe],
        device: torch.device,
        channels: torch.Tensor | None,
        usual: float,
    ):
        self.rows, self.name, self.device = rows, decision.layer, device
        self.recipes = tuple(recipes)
        self.channels = None if channels is None else channels.to(device=device, dtype=torch.float32)
        self.usual = usual
        self.signal = 0.0
        self.noise = [0.0] * len(self.recipes)

    def tasks(self, done: Callable[[LayerError], None]) -> Iterator[Task]:
        runs = self.rows.runs()
        for expert in range(self.rows.shape[0] if len(self.rows.shape) == 3 else 1):
            own = [run for run in runs if run.expert == expert]
            common = [_Common(recipe, self.rows.shape[-2:]) for recipe in self.recipes]
            # A matrix that comes in several runs is looked through first where something is common to all its rows.
            twice = len(own) > 1 and any(one.wanted for one in common)
            if twice:
                for run in own:
                    yield self._task(run, lambda run, weight, common=common: self._look(common, run, weight), False)
            for run in own:
                yield self._task(
                    run, lambda run, weight, common=common, look=not twice: self._measure(common, look, run, weight)
                )

        def finish(nothing: torch.Tensor) -> None:
            done(LayerError(self.signal, tuple(self.noise)))

        yield Task(lambda: torch.empty(0), finish, 0, self.name)

    def _task(self, run: RowRun, handle: Callable[[RowRun, torch.Tensor], None], counted: bool = True) -> Task:
        count = (run.stop - run.start) * self.rows.shape[-1] * self.rows.dtype.itemsize
        load, room = functools.partial(self.rows.load, run), self.rows.room(run)
        return Task(load, lambda weight: handle(run, weight), count * counted, self.name, room)

    def _look(self, common: list[_Common], run: RowRun, weight: torch.Tensor) -> None:
        weight = weight.to(self.rows.dtype)
        peak = weight.abs().amax() if weight.numel() else torch.zeros((), dtype=self.rows.dtype)
        if self.recipes and not torch.isfinite(peak):
            raise QuantError(
                self.rows.source.where(self.rows.key),
                f"layer {self.name!r} has NaN or infinite weights in rows {run.start} to {run.stop - 1}: the file is "
                "broken. Get it again, or leave the layer out (exclude, in a graph keep)",
            )
        for one in common:
            one.look(peak.to(self.device), run, weight)

    def _measure(self, common: list[_Common], look: bool, run: RowRun, weight: torch.Tensor) -> None:
        if look:
            self._look(common, run, weight)
        step = max(128, _BATCH // max(weight.shape[1], 1) // 128 * 128)
        for start in range(0, weight.shape[0], step):
            piece = weight[start : start + step].to(self.device).to(self.rows.dtype)
            exact = piece.float()
            self.signal += self._power(exact)
            for place, one in enumerate(common):
                scale, codebook = one.settled(self.device)
                tensors = quantize_matrix(piece, one.recipe, scale=scale, codebook=codebook)
                restored = dequantize_matrix(tensors, one.recipe, torch.float32)
                self.noise[place] += self._power(restored[: piece.shape[0], : piece.shape[1]] - exact)

    def _power(self, values: torch.Tensor) -> float:
        """Sum of squares, each column weighted by the power of its input channel; 0 for a weight that is broken."""
        squares = values.square()
        total = self.usual * squares.sum() if self.channels is None else (squares.sum(0) * self.channels).sum()
        return float(total) if torch.isfinite(total) else 0.0


class _Common:
    """What all rows of one matrix share in one recipe."""

    def __init__(self, recipe: Recipe, shape: tuple[int, ...]):
        self.recipe = recipe
        # A weight that is quantized in one piece has its codebook chosen there.
        pieces = shape[0] > max(128, _BATCH // max(shape[1], 1) // 128 * 128)
        self.sampler = CodebookSampler(shape, recipe) if recipe.codebook and pieces else None
        self.wanted = self.sampler is not None or has_tensor_scale(recipe)
        self._peaks: list[torch.Tensor] = []
        self._settled: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    def look(self, peak: torch.Tensor, run: RowRun, weight: torch.Tensor) -> None:
        self._peaks.append(peak)
        if self.sampler is not None:
            self.sampler.add(run, weight)

    def settled(self, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if self._settled is None:
            codebook = None if self.sampler is None else self.sampler.codebook().to(device)
            self._settled = (tensor_scale(self.recipe, torch.stack(self._peaks).amax()), codebook)
        return self._settled
