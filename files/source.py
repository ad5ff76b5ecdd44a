"""One door for weights on disk: a file, a folder, a set of shards, a component of a diffusers pipeline.

Only headers are read on opening. A tensor is read when asked for, into memory of its own, and every file is opened
once; nothing is mapped, so reading 40 GB costs no more memory than its largest tensor.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .dtypes import ELEMENT_BITS, torch_dtype
from .errors import DamagedFile, FileError, NotSafetensors
from .header import Header, TensorInfo, parse_json_object, read_header
from .paths import safe_parts

__all__ = ["Source", "open_source"]

_DEFAULT_STEMS = ("diffusion_pytorch_model", "model")
_SHARD = r"(.+)-(\d{5})-of-(\d{5})\.safetensors$"
_CHUNK = 1 << 30


class _Part:
    """One open file."""

    def __init__(self, header: Header):
        self.header = header
        self._file = open(header.path, "rb", buffering=0)  # noqa: SIM115 - closed by Source.close
        if os.fstat(self._file.fileno()).st_size != header.file_size:
            self._file.close()
            raise FileError(header.path, "changed while it was being opened")
        self._lock = threading.Lock()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        position = self.header.data_start + offset
        while buffer:
            count = self._read_some(buffer[:_CHUNK], position)
            if count <= 0:
                raise DamagedFile(self.header.path, f"ended at byte {position:,} while a tensor was being read")
            buffer, position = buffer[count:], position + count

    def _read_some(self, buffer: memoryview, position: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [buffer], position)
        with self._lock:
            self._file.seek(position)
            return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()


class Source:
    """Weights on disk, opened by `open_source`. A context manager; reading is safe from several threads.

    ``path`` what was opened; ``tensors`` name -> TensorInfo (offsets are those in the tensor's own file);
    ``metadata`` of the header (of all shards, the first winning); ``parts`` the headers; ``config`` the parsed
    ``config.json`` beside folder weights, else None.
    """

    def __init__(self, path: str | os.PathLike, headers: list[Header], config: dict[str, Any] | None = None):
        self.path = os.fspath(path)
        self.parts = tuple(headers)
        self.config = config
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._owner: dict[str, int] = {}
        for index, header in enumerate(headers):
            for name, info in header.tensors.items():
                if name in self._owner:
                    other = headers[self._owner[name]].path
                    raise DamagedFile(header.path, f"tensor {name!r} is also in {other}")
                self._owner[name] = index
                self.tensors[name] = info
            for key, value in header.metadata.items():
                self.metadata.setdefault(key, value)
        self._open: dict[int, _Part] = {}
        self._open_lock = threading.Lock()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def close(self) -> None:
        with self._open_lock:
            for part in self._open.values():
                part.close()
            self._open.clear()

    def only(self, wanted: Callable[[str], bool]) -> Source:
        """The same open files with some of their tensors in sight; closing either closes both."""
        parts = [
            replace(part, tensors={name: info for name, info in part.tensors.items() if wanted(name)})
            for part in self.parts
        ]
        part = Source(self.path, parts, self.config)
        part._open, part._open_lock = self._open, self._open_lock
        return part

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that hold the tensors."""
        return tuple(header.path for header in self.parts)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}

    def where(self, name: str) -> str:
        """The path of the file that holds ``name``, for messages."""
        return self.parts[self._owner[name]].path

    def info(self, name: str) -> TensorInfo:
        """Raises FileError when there is no such tensor."""
        try:
            return self.tensors[name]
        except KeyError:
            raise FileError(self.path, f"has no tensor {name!r}") from None

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name`` on the CPU, in its stored dtype and shape, owning its memory.

        Raises FileError (no such tensor, file cut off, dtype unknown to this torch).
        """
        info = self.info(name)
        return self._as_tensor(info, self._read(name, info.start, info.nbytes), info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` of the first dimension of ``name``."""
        info = self.info(name)
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise FileError(self.where(name), f"tensor {name!r} {list(info.shape)} has no rows {start}:{stop}")
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        raw = self._read(name, info.start + start * row, (stop - start) * row)
        return self._as_tensor(info, raw, (stop - start, *info.shape[1:]))

    def read_bytes(
        self, name: str, start: int = 0, stop: int | None = None, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The stored bytes ``start:stop`` of ``name`` as a 1-D uint8 tensor; works for every element type. ``into``:
        such a tensor of at least as many bytes, which they are read into and whose beginning is then returned."""
        info = self.info(name)
        stop = info.nbytes if stop is None else stop
        if not 0 <= start <= stop <= info.nbytes:
            raise FileError(self.where(name), f"tensor {name!r} has no bytes {start}:{stop}")
        return self._read(name, info.start + start, stop - start, into)

    def _read(self, name: str, offset: int, count: int, into: torch.Tensor | None = None) -> torch.Tensor:
        raw = torch.empty(count, dtype=torch.uint8) if into is None else into[:count]
        if count:
            self._part(self._owner[name]).read_into(memoryview(raw.numpy()), offset)
        return raw

    def _part(self, index: int) -> _Part:
        with self._open_lock:
            if index not in self._open:
                self._open[index] = _Part(self.parts[index])
            return self._open[index]

    def _as_tensor(self, info: TensorInfo, raw: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            dtype = torch_dtype(info.dtype)
        except ValueError as error:
            raise FileError(self.where(info.name), f"tensor {info.name!r}: {error}") from None
        if raw.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        assert ELEMENT_BITS[info.dtype] % 8 == 0
        return raw.view(dtype).reshape(shape)


# What a publisher calls the folder of a component in place of the usual name.
_OTHER_NAMES = {"transformer": ("dit_model",)}  # F-Lite


def open_source(path: str | os.PathLike, *, component: str | None = None) -> Source:
    """Open weights wherever they are: a .safetensors file, a ``*.index.json``, a folder of one or more files.

    ``component`` ("transformer", "vae", ...) picks that folder of a diffusers pipeline; when ``path`` is already the
    component's own folder it is used as it is. Raises FileNotFoundError, FileError.
    """
    path = Path(path)
    if path.is_dir():
        names = (component, *_OTHER_NAMES.get(component, ())) if component is not None else ()
        path = next((path / name for name in names if (path / name).is_dir()), path)
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return Source(path, _indexed(path), _config(path.parent))
    return Source(path, [read_header(path)])


def _open_folder(folder: Path) -> Source:
    config = _config(folder)
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        index = _preferred(folder, indexes, ".safetensors.index.json")
        return Source(folder, _indexed(index), config)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NotSafetensors(folder, _explain_empty(folder))
    if all(re.match(_SHARD, file.name) for file in files):
        return Source(folder, [read_header(file) for file in _complete_set(folder, files)], config)
    return Source(folder, [read_header(_preferred(folder, files, ".safetensors"))], config)


def _preferred(folder: Path, files: list[Path], suffix: str) -> Path:
    if len(files) == 1:
        return files[0]
    for stem in _DEFAULT_STEMS:
        if folder / f"{stem}{suffix}" in files:
            return folder / f"{stem}{suffix}"
    names = ", ".join(file.name for file in files[:8])
    raise FileError(folder, f"holds several candidates ({names}); name the one to use")


def _complete_set(folder: Path, files: list[Path]) -> list[Path]:
    sets = {(match[1], match[3]) for match in (re.match(_SHARD, file.name) for file in files)}
    if len(sets) != 1:
        raise FileError(folder, "holds several sets of shards; name the index file of the one to use")
    total = int(next(iter(sets))[1])
    found = {int(re.match(_SHARD, file.name)[2]) for file in files}
    missing = sorted(set(range(1, total + 1)) - found)
    if missing:
        raise FileError(folder, f"lacks shard {missing[0]:05d} of {total:05d}; get the missing file")
    return files


def _indexed(index: Path) -> list[Header]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(value, str) for value in weight_map.values()):
        raise DamagedFile(index, "has no weight_map of tensor names to files")
    headers = []
    for name in dict.fromkeys(weight_map.values()):
        # Hugging Face's cache keeps each shard as a link to a blob elsewhere: only the name itself is checked.
        shard = index.parent.joinpath(*safe_parts(name, index.parent))
        if not shard.exists():
            raise FileError(index, f"names the shard {name}, which is not beside it; get the missing file")
        headers.append(read_header(shard))
    present = {name: os.path.basename(header.path) for header in headers for name in header.tensors}
    for name in weight_map:
        if name not in present:
            raise DamagedFile(index, f"names the tensor {name!r}, which {weight_map[name]} does not hold")
    return headers


def _config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    return _read_json(path) if path.is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return parse_json_object(path, file.read(64 * 1024 * 1024), path.name)


def _explain_empty(folder: Path) -> str:
    inner = sorted(child.name for child in folder.iterdir() if child.is_dir() and any(child.glob("*.safetensors")))
    if inner:
        return f"no .safetensors file here, but in its folders {', '.join(inner[:8])}: name one of these"
    pickles = sorted(child.name for child in folder.iterdir() if child.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        return f"no .safetensors file here, only pickles ({', '.join(pickles[:4])}): get the safetensors version"
    return "a folder without .safetensors files"
