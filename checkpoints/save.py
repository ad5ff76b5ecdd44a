"""Writing what a conversion makes: one file, or a diffusers folder with its config.json, complete or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..files.atomic import new_folder
from ..files.paths import refuse_same_file
from ..files.writer import SafetensorsWriter
from ..quant.canonical import kept_metadata
from ..quant.output import Assembly
from ..quant.stream import Meter, Progress, Writing, run_tasks
from ..supported_models import Target
from .moves import Move

# Larger folders are written as shards, as the libraries that read them do.
SHARD_BYTES = 10_000_000_000


def write_file(
    destination: str | os.PathLike,
    moves: list[tuple[str, Move]],
    metadata: Mapping[str, str],
    progress: Progress | None = None,
) -> None:
    """One safetensors file of (prefix, move) pairs. ``metadata`` is added to what the source's header says.

    Raises OutputError (the source itself, a full disk), FileError.
    """
    parts = [move.assembly(prefix=prefix) for prefix, move in moves]
    _write(destination, parts, lambda: _metadata(moves, metadata), _meter(parts, progress))


def write_assembly(
    destination: str | os.PathLike, assembly: Assembly, metadata: Mapping[str, str], meter: Meter
) -> None:
    """One safetensors file of what is put together already. Raises OutputError."""
    _write(destination, [assembly], lambda: dict(metadata), meter)


def write_folder(
    destination: str | os.PathLike,
    move: Move,
    config: Mapping[str, Any] | None,
    *,
    stem: str = "diffusion_pytorch_model",
    files: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A folder with weights, their configuration and other files; beyond a size, the weights are shards and an index.

    The folder must be new or empty. Raises OutputError and FileError.
    """
    refuse_same_file(destination, [*move.checkpoint.source.paths, move.checkpoint.path])
    shards = _shards(move, shard_bytes)
    parts = []
    for number, targets in enumerate(shards, 1):
        name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        parts.append(move.assembly(targets, name))
    if move.constants:
        for name, tensor in move.constants.items():
            parts[0].constant(name, tensor)
    meter = _meter(parts, progress)
    with new_folder(destination) as folder:
        for part in parts:
            _write(folder / part.file_name, [part], lambda: _metadata([("", move)], metadata or {}), meter)
        if len(parts) > 1:
            weight_map = {entry[0]: part.file_name for part in parts for entry in part.entries}
            total = sum(os.path.getsize(folder / part.file_name) for part in parts)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(folder / f"{stem}.safetensors.index.json", index)
        if config is not None:
            _write_json(folder / "config.json", config)
        for name, data in (files or {}).items():
            (folder / name).write_bytes(data)


def _shards(move: Move, limit: int) -> list[list[Target]]:
    """Targets in order, cut where a file would become larger than ``limit``."""
    shards: list[list[Target]] = [[]]
    size = 0
    for target in move.targets:
        own = move.size_of(target)
        if shards[-1] and size + own > limit:
            shards.append([])
            size = 0
        shards[-1].append(target)
        size += own
    return shards


def _metadata(moves: list[tuple[str, Move]], added: Mapping[str, str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for _, move in moves:
        for key, value in kept_metadata(move.checkpoint.source, move.provenance()).items():
            kept.setdefault(key, value)
    return {**kept, **added}


def _meter(parts: list[Assembly], progress: Progress | None) -> Meter:
    return Meter(sum(part.read_bytes for part in parts), progress)


def _write(
    path: str | os.PathLike, parts: list[Assembly], metadata: Callable[[], dict[str, str]], meter: Meter
) -> None:
    sources = [file for part in parts for file in (*part.source.paths, part.source.path)]
    entries = [entry for part in parts for entry in part.entries]
    with SafetensorsWriter(path, entries, metadata(), sources=sources) as writer:
        with Writing(writer) as writing:
            for part in parts:
                run_tasks(part.tasks(writing), meter)
        # Checksums of quantized layers are known only now.
        writer.replace_metadata(metadata())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
