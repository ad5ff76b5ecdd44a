"""Puts together a safetensors file, or a folder of shards, from pieces that are computed on the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from ..files import FileError, SafetensorsWriter, Source, refuse_same_file
from ..files.atomic import new_folder
from ..files.dtypes import name_of
from .stream import Meter, Task, Writing, cast_tasks, copy_tasks, run_tasks

__all__ = ["Assembly", "assemblies_for", "is_folder_target", "write_output"]

Step = Callable[[Writing], Iterator[Task]]


class Assembly:
    """The content of one file to be written: what each tensor is, and the steps that produce it."""

    def __init__(self, source: Source, file_name: str = ""):
        self.source = source
        self.file_name = file_name
        self.entries: list[tuple[str, str, tuple[int, ...]]] = []
        self._steps: list[Step] = []
        self.read_bytes = 0

    def copy(self, key: str, name: str | None = None, dtype: str | None = None) -> None:
        """The stored bytes of ``key``, under ``name``; ``dtype`` (safetensors name) gives them another type."""
        info, name = self.source.info(key), name or key
        self.entries.append((name, dtype or info.dtype, info.shape))
        self.read_bytes += info.nbytes
        self._steps.append(lambda writing: copy_tasks(self.source, key, name, writing))

    def cast(self, key: str, dtype: torch.dtype, name: str | None = None) -> None:
        info, name = self.source.info(key), name or key
        self.entries.append((name, name_of(dtype), info.shape))
        self.read_bytes += info.nbytes
        self._steps.append(lambda writing: cast_tasks(self.source, key, name, dtype, writing))

    def constant(self, name: str, tensor: torch.Tensor) -> None:
        """A small tensor that is known already."""
        self.entries.append((name, name_of(tensor.dtype), tuple(tensor.shape)))
        self._steps.append(lambda writing: _put_constant(writing, name, tensor))

    def computed(self, entries: Iterable[tuple[str, str, tuple[int, ...]]], step: Step, read_bytes: int) -> None:
        self.entries.extend(entries)
        self._steps.append(step)
        self.read_bytes += read_bytes

    def tasks(self, writing: Writing) -> Iterator[Task]:
        for step in self._steps:
            yield from step(writing)


def _put_constant(writing: Writing, name: str, tensor: torch.Tensor) -> Iterator[Task]:
    writing.put(name, tensor)
    yield from ()


def is_folder_target(destination: str | os.PathLike) -> bool:
    text = os.fspath(destination)
    return os.path.isdir(text) or text.endswith(("/", os.sep)) or not os.path.splitext(text)[1]


def assemblies_for(source: Source, destination: str | os.PathLike) -> tuple[list[Assembly], Callable[[str], Assembly]]:
    """One assembly per file to write, and the one a source key's result belongs to."""
    if not is_folder_target(destination):
        single = Assembly(source)
        return [single], lambda key: single
    by_path = {part.path: Assembly(source, os.path.basename(part.path)) for part in source.parts}
    if len({assembly.file_name for assembly in by_path.values()}) != len(by_path):
        raise FileError(source.path, "two of its shards have the same file name")
    return list(by_path.values()), lambda key: by_path[source.where(key)]


def write_output(
    source: Source,
    destination: str | os.PathLike,
    assemblies: list[Assembly],
    metadata: Callable[[Assembly], Mapping[str, str]],
    meter: Meter,
) -> None:
    """Writes the file, or the folder, so that it appears complete or not at all. Raises OutputError.

    ``metadata`` is asked before and after the data are written: values that become known only on the way (checksums)
    must have the same length both times.
    """
    refuse_same_file(destination, [*source.paths, source.path])
    if not is_folder_target(destination):
        _write_file(destination, assemblies[0], metadata, meter)
        return
    with new_folder(destination) as folder:
        for assembly in assemblies:
            _write_file(folder / assembly.file_name, assembly, metadata, meter)
        _write_companions(source, folder, assemblies)


def _write_file(
    path: str | os.PathLike,
    assembly: Assembly,
    metadata: Callable[[Assembly], Mapping[str, str]],
    meter: Meter,
) -> None:
    with SafetensorsWriter(path, assembly.entries, metadata(assembly), sources=assembly.source.paths) as writer:
        with Writing(writer) as writing:
            run_tasks(assembly.tasks(writing), meter)
        writer.replace_metadata(metadata(assembly))


def _write_companions(source: Source, folder: Path, assemblies: list[Assembly]) -> None:
    """The index of the shards, and config.json."""
    if len(assemblies) > 1:
        weight_map = {entry[0]: assembly.file_name for assembly in assemblies for entry in assembly.entries}
        stem = assemblies[0].file_name.split("-00001")[0].removesuffix(".safetensors")
        index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    if source.config is not None:
        with suppress(FileNotFoundError):
            shutil.copyfile(Path(source.path) / "config.json", folder / "config.json")
