"""What a file holds, from its header (and the markers of quantized layers, some 30 bytes each)."""

from __future__ import annotations

import collections
import math
import os
from dataclasses import dataclass, field
from typing import Any

from ..quant.describe import QuantizationInfo, describe
from ..supported_models import find_architecture
from ..text_encoders.families import find_text_encoder
from .kinds import TEXT_ENCODER, kind_of
from .opened import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class CheckpointInfo:
    """``nativedit.inspect``'s answer. Sizes in bytes; ``dtypes``: safetensors dtype -> number of tensors;
    ``parameters`` counts weights, packed ones unpacked, side tensors of quantized layers left out."""

    path: str
    kind: str
    title: str
    architecture: str | None
    prefix: str
    layout: str | None
    config: dict[str, Any]
    tensors: int
    parameters: int
    nbytes: int
    dtypes: dict[str, int]
    quantization: QuantizationInfo
    metadata: dict[str, str] = field(repr=False)


def inspect(path: str | os.PathLike) -> CheckpointInfo:
    """Never reads a weight. Raises FileError, FileNotFoundError."""
    with open_checkpoint(path) as checkpoint:
        return inspect_source(checkpoint)


def inspect_source(checkpoint: Checkpoint) -> CheckpointInfo:
    """The same of a checkpoint that is open."""
    shapes, source = checkpoint.shapes, checkpoint.source
    kind = kind_of(shapes)
    architecture, prefix, layout, config = None, "", None, {}
    if kind is TEXT_ENCODER:
        found = find_text_encoder(shapes, checkpoint.metadata)
        if found:
            family, prefix, config = found[0]
            architecture = family.name
    elif (match := find_architecture(shapes, metadata=checkpoint.metadata)) is not None:
        architecture, prefix, config = match.architecture.name, match.prefix, match.config
        layout = match.layout.name if match.layout else None
    infos = source.tensors.values()
    return CheckpointInfo(
        path=checkpoint.path,
        kind=kind.name,
        title=kind.title,
        architecture=architecture,
        prefix=prefix,
        layout=layout,
        config=config,
        tensors=len(source),
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        nbytes=sum(info.nbytes for info in infos),
        dtypes=dict(collections.Counter(info.dtype for info in infos)),
        quantization=describe(source),
        metadata=dict(source.metadata),
    )
