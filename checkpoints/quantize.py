"""``quant.convert.quantize`` with the file's card: its policy decides, and the result must be recognised the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..quant.convert import quantize as quantize_with
from ..quant.limits import parse_limits
from ..quant.report import QuantizationReport
from ..supported_models import Shapes, find_architecture
from ..text_encoders.families import find_text_encoder
from . import diffusion
from .opened import open_checkpoint

GENERIC, CARD = "generic", "card"


def identity(shapes: Shapes) -> tuple[Any, ...] | None:
    """What detection makes of these shapes: architecture (or text encoder) and configuration, None for an unknown."""
    match = find_architecture(shapes)
    if match is not None:
        return match.architecture.name, match.prefix, match.layout and match.layout.name, match.config
    found = find_text_encoder(shapes)
    return (found[0][0].name, found[0][1], found[0][2]) if found else None


def quantize(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    format: str | None = None,
    # None or "card" = the card's rules where the architecture is known, else the generic ones; "generic" = always
    # those; a TOML file (or its content as a dict), or a file that was quantized within a budget: its plan.
    policy: str | os.PathLike | Mapping[str, Any] | None = None,
    target: str | None = None,  # the device that is to run the result: "sm89", "cpu", "mps"
    comfyui: str | None = None,  # the oldest version that must read it
    **options: Any,
) -> QuantizationReport:
    """Quantize a file or a folder by the rules of its architecture's card, or by others.

    The policy is the card's where the architecture is known and else the generic one, unless it is named: generic, a
    file of rules or its content, or a file that was quantized within a budget, for its plan.
    A budget is a size that the finished file must keep, or a least quality; then the format of each layer is chosen.
    Formats that the device or the ComfyUI named does not know are not used. For the other options and for the errors
    see the function of the same name in the package of quantization.
    """
    # quant.convert.quantize; budgets are target_size="6GB" and min_sqnr="35dB", with formats=(...) to choose from.
    card = None
    if policy != GENERIC:
        with open_checkpoint(source) as checkpoint:
            match = find_architecture(checkpoint.shapes, metadata=checkpoint.metadata)
        card = match.architecture.quantization if match is not None else None
    return quantize_with(
        source,
        destination,
        format=format,
        policy=None if policy in (GENERIC, CARD) else policy,
        card_policy=card,
        detect=identity,
        limits=parse_limits(target, comfyui),
        groups=lambda: fused_groups(source),
        **options,
    )


def fused_groups(source: str | os.PathLike) -> list[tuple[str, ...]]:
    """Layers of another layout that become one layer in ComfyUI's (q, k and v): a budget gives them one format."""
    groups = []
    with open_checkpoint(source) as checkpoint:
        match = find_architecture(checkpoint.shapes, metadata=checkpoint.metadata)
        if match is None or match.layout is None:
            return []
        _, move, _ = diffusion.to_comfy(checkpoint, match.architecture.name)
    for target in move.targets:
        layers = tuple(dict.fromkeys(run.key.removesuffix(".weight") for run in target.runs))
        if len(layers) > 1 and target.name.endswith(".weight"):
            groups.append(layers)
    return groups
