"""A file opened for recognition: its weights as an unquantized file would show them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..files.source import Source, open_source
from ..quant.reader import QuantizedFile, read_quantized
from .stored_config import metadata_of


@dataclass(frozen=True)
class Checkpoint:
    """``shapes``: key -> logical shape, side tensors of quantized layers left out; ``metadata``: the header's entries;
    ``quantized``: what is known of quantized layers (no weights read for it)."""

    source: Source
    quantized: QuantizedFile
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]

    @property
    def path(self) -> str:
        return self.source.path


@contextmanager
def open_checkpoint(path: str | os.PathLike | Source, *, component: str | None = None) -> Iterator[Checkpoint]:
    """``files.open_source`` (or a source that is open already) with quantized layers understood.

    Raises FileError, FileNotFoundError."""
    if isinstance(path, Source):
        yield checkpoint_of(path)
        return
    with open_source(path, component=component) as source:
        yield checkpoint_of(source)


def checkpoint_of(source: Source) -> Checkpoint:
    """Any source of weights, understood in the same way. Raises QuantError."""
    quantized = read_quantized(source)
    return Checkpoint(source, quantized, quantized.logical_shapes(source), metadata_of(source))
