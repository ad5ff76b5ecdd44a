"""What a file holds, from its header alone."""

from __future__ import annotations

import collections
import math
import os
from dataclasses import dataclass, field
from typing import Any

from ..files.source import open_source
from ..supported_models import find_architecture
from ..text_encoders.families import find_text_encoder
from .kinds import TEXT_ENCODER, kind_of
from .stored_config import metadata_of


@dataclass(frozen=True)
class CheckpointInfo:
    """``nativedit.inspect``'s answer. Sizes in bytes; ``dtypes``: safetensors dtype -> number of tensors."""

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
    metadata: dict[str, str] = field(repr=False)


def inspect(path: str | os.PathLike) -> CheckpointInfo:
    """Reads headers only, never a tensor. Raises FileError, FileNotFoundError."""
    with open_source(path) as source:
        shapes = source.shapes()
        kind = kind_of(shapes)
        architecture, prefix, layout, config = None, "", None, {}
        if kind is TEXT_ENCODER:
            found = find_text_encoder(shapes, metadata_of(source))
            if found:
                family, prefix, config = found[0]
                architecture = family.name
        elif (match := find_architecture(shapes, metadata=metadata_of(source))) is not None:
            architecture, prefix, config = match.architecture.name, match.prefix, match.config
            layout = match.layout.name if match.layout else None
        infos = source.tensors.values()
        return CheckpointInfo(
            path=source.path,
            kind=kind.name,
            title=kind.title,
            architecture=architecture,
            prefix=prefix,
            layout=layout,
            config=config,
            tensors=len(source),
            parameters=sum(math.prod(info.shape) for info in infos),
            nbytes=sum(info.nbytes for info in infos),
            dtypes=dict(collections.Counter(info.dtype for info in infos)),
            metadata=dict(source.metadata),
        )
