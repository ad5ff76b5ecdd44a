"""Which weights of a source are quantized, and how, by its architecture's card: for loading, saving, in a graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..files.dtypes import torch_dtype
from ..files.errors import FileError
from ..files.memory import Lazy, MemoryWriter, TensorSource
from ..files.source import Source
from ..quant.craft import PLAIN, Craft
from ..quant.formats import Recipe, is_format
from ..quant.stream import Meter, Progress, Writing, run_tasks
from ..quant.transform import Plan, Wish, plan_quantization, plan_storage
from ..supported_models import Match, Shapes, find_architecture
from . import diffusion
from .moves import Move
from .opened import Checkpoint, checkpoint_of
from .quantize import CARD, GENERIC, identity

__all__ = ["CARD", "GENERIC", "Wish", "comfy_layout", "plan", "refuse_idle"]


def plan(
    source: Source,
    precision: str | None,  # None = as stored, a float type, or a quantization format
    *,
    policy: str | os.PathLike | Mapping[str, Any] = CARD,  # "card", "generic", or a TOML file
    exclude: Iterable[str] = (),
    requantize: Mapping[str, Recipe] | None = None,
    device: str | torch.device | None = None,
    detect: Callable[[Shapes], Any] = identity,  # logical shapes -> anything comparable
    budget: Wish | None = None,
    progress: Progress | None = None,  # of measuring
    craft: Craft = PLAIN,  # how codes are made
) -> Plan:
    """How a model's weights become those of a precision, or of the formats that a budget allows: then every layer gets
    the one that serves it best, the precision named or any.

    The result of quantizing is detected as the same model. Raises FileError, QuantError and ValueError.
    """
    if precision is not None or not requantize:
        refuse_idle(precision, budget, craft)
    if precision is None and (budget is None or not budget.given):
        return plan_storage(source, requantize=requantize, device=device, craft=craft)
    card = _card(source)
    if precision is not None and not is_format(precision):
        return plan_storage(source, dtype=precision, keep_float32=card.keep_float32 if card else ())
    return plan_quantization(
        source,
        format=precision,
        policy=None if policy in (CARD, GENERIC) else policy,
        card_policy=card.quantization if card and policy != GENERIC else None,
        exclude=exclude,
        requantize=requantize,
        device=device,
        detect=detect,
        budget=budget,
        progress=progress,
        craft=craft,
    )


def refuse_idle(precision: str | None, budget: Wish | None, craft: Craft = PLAIN) -> None:
    """Raises ValueError where settings of quantizing stand beside a precision that quantizes nothing."""
    given = budget is not None and budget.given
    if given if precision is None else is_format(precision):
        return
    if given:
        raise ValueError(
            f"target_size and min_sqnr choose quantization formats, and {precision} is none. Set precision to as "
            "stored (any format) or to a quantization format, or both budgets to 0"
        )
    if craft != PLAIN:
        raise ValueError(
            f"statistics and rounding are for quantizing, and {precision or 'as stored'} quantizes nothing. Choose a "
            "quantization format, or set calibration to none and rounding to plain"
        )


def _card(source: Source) -> Any:
    checkpoint = checkpoint_of(source)
    match = find_architecture(checkpoint.shapes, metadata=checkpoint.metadata)
    return match.architecture if match is not None else None


def comfy_layout(checkpoint: Checkpoint, match: Match | None) -> Source:
    """A source whose tensors have ComfyUI's names and fusions, whatever layout the file has; read when asked for."""
    if match is None or match.layout is None:
        return checkpoint.source
    match, move, metadata = diffusion.to_comfy(checkpoint, match.architecture.name)
    if any(layer.dialect != "cast" for layer in checkpoint.quantized.layers.values()):
        raise FileError(
            checkpoint.path,
            f"is quantized and in the {match.layout.name} layout; make a ComfyUI file of it first "
            "(nativedit convert FILE OUT --to comfy)",
        )
    tensors: dict[str, torch.Tensor | Lazy] = dict(move.constants)
    for target in move.targets:
        tensors[target.name] = _lazy(move, target)
    return TensorSource(checkpoint.path, tensors, {**checkpoint.source.metadata, **metadata})


def _lazy(move: Move, target: Any) -> Lazy:
    assembly = move.assembly([target])
    [(name, dtype, shape)] = assembly.entries

    def make() -> torch.Tensor:
        memory = MemoryWriter(assembly.entries)
        with Writing(memory) as writing:
            run_tasks(assembly.tasks(writing), Meter(0, None))
        return memory.tensors[name]

    return Lazy(torch_dtype(dtype), shape, make)
