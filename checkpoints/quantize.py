"""``quant.convert.quantize`` with the file's card: its policy decides, and the result must be recognised the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..quant.convert import quantize as quantize_with
from ..quant.report import QuantizationReport
from ..supported_models import Shapes, find_architecture
from ..text_encoders.families import find_text_encoder
from .opened import open_checkpoint

GENERIC = "generic"


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
    policy: str | os.PathLike | Mapping[str, Any] | None = None,
    **options: Any,
) -> QuantizationReport:
    """policy: None = the card's rules where the architecture is known, else the generic ones; "generic" = always those;
    or a TOML file (or its content as a dict). Other options and errors: see ``quant.convert.quantize``."""
    card = None
    if policy != GENERIC:
        with open_checkpoint(source) as checkpoint:
            match = find_architecture(checkpoint.shapes, metadata=checkpoint.metadata)
        card = match.architecture.quantization if match is not None else None
    return quantize_with(
        source,
        destination,
        format=format,
        policy=None if policy == GENERIC else policy,
        card_policy=card,
        detect=identity,
        **options,
    )
