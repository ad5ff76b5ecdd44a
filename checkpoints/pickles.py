"""PyTorch pickles (.pth, .pt, .bin, .ckpt), read for conversion alone: no code in them is ever run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import serialization

from ..files.dtypes import name_of
from ..files.errors import FileError, NotSafetensors
from ..files.header import Header, TensorInfo, parse_json_object
from ..files.sniff import foreign_kind
from ..files.source import Source, open_source
from ..files.writer import tensor_bytes
from ..quant.reader import read_quantized
from .opened import Checkpoint
from .stored_config import metadata_of

SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")
_INDEXES = tuple(f"{suffix}.index.json" for suffix in SUFFIXES)
_SHARD = r"(.+)-(\d{5})-of-(\d{5})(\.\w+)"
# Where trainers put the weights inside what they save; the first that is there is taken.
_NESTS = ("state_dict", "model_state_dict", "module", "model", "ema", "params")


class PickleSource(Source):
    """Weights of pickles, mapped into memory where their format allows, with the interface of ``files.Source``."""

    def __init__(self, path: str | os.PathLike, tensors: Mapping[str, tuple[str, torch.Tensor]], config=None):
        self._tensors = {name: tensor for name, (_, tensor) in tensors.items()}
        infos: dict[str, dict[str, TensorInfo]] = {}
        for name, (file, tensor) in tensors.items():
            size = tensor.numel() * tensor.element_size()
            infos.setdefault(file, {})[name] = TensorInfo(name, name_of(tensor.dtype), tuple(tensor.shape), 0, size)
        headers = [Header(file, {}, own, 0, os.path.getsize(file)) for file, own in infos.items()]
        super().__init__(path, headers, config)

    def _read(self, name: str, offset: int, count: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """What is mapped into memory is copied from there; ``into`` is not needed."""
        data = tensor_bytes(self._tensors[name])[offset : offset + count]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        self._tensors = {}
        super().close()


def _is_safetensors(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(9)
    # The header's length in 8 bytes, then its JSON.
    return head[4:8] == bytes(4) and head[8:] == b"{"


def is_pickle(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in SUFFIXES


@contextmanager
def open_any(path: str | os.PathLike, *, component: str | None = None) -> Iterator[Checkpoint]:
    """``open_checkpoint`` for pickles too. Raises FileError, FileNotFoundError."""
    with open_weights(path, component=component) as source:
        quantized = read_quantized(source)
        yield Checkpoint(source, quantized, quantized.logical_shapes(source), metadata_of(source))


def open_weights(path: str | os.PathLike, *, component: str | None = None) -> Source:
    """``files.open_source`` for pickles too. Raises FileError, FileNotFoundError."""
    path = Path(path)
    if is_pickle(path):
        # Files are often renamed by whoever uploads them: what they are shows inside.
        return open_source(path) if _is_safetensors(path) else _of_files(path, [path])
    if path.name.endswith(_INDEXES) and path.is_file():
        return _of_files(path, _indexed(path))
    folder = path / component if component is not None and (path / component).is_dir() else path
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        files = _in_folder(folder)
        if files:
            return _of_files(folder, files)
    return open_source(path, component=component)


def _in_folder(folder: Path) -> list[Path]:
    """The pickles that make up the one model of a folder. Raises FileError when there are several."""
    indexes = sorted(file for file in folder.iterdir() if file.name.endswith(_INDEXES))
    if indexes:
        return _indexed(indexes[0])
    files = sorted(file for file in folder.iterdir() if is_pickle(file))
    shards = [match for file in files if (match := re.fullmatch(_SHARD, file.name))]
    if shards and len(shards) == len(files) and len({(shard[1], shard[3], shard[4]) for shard in shards}) == 1:
        total = int(shards[0][3])
        if missing := sorted(set(range(1, total + 1)) - {int(shard[2]) for shard in shards}):
            raise FileError(folder, f"lacks shard {missing[0]:05d} of {total:05d}; get the missing file")
        return files
    if len(files) > 1:
        raise FileError(folder, f"holds several pickles ({', '.join(f.name for f in files[:4])}); name the one to use")
    return files


def _indexed(index: Path) -> list[Path]:
    """The shards that an index names. Raises FileError."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise FileError(index, "has no weight_map of tensor names to files; get the index again, or remove it")
    names = sorted({os.path.basename(name) for name in weight_map.values()})
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileError(index, f"names the shard {missing[0]}, which is not beside it; get the missing file")
    return [index.parent / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    return parse_json_object(path, path.read_bytes(), path.name)


def _of_files(path: Path, files: list[Path]) -> PickleSource:
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    for file in files:
        for name, tensor in _load(file).items():
            tensors[name] = (os.fspath(file), tensor)
    folder = path if path.is_dir() else path.parent
    config_file = folder / "config.json"
    config = _read_json(config_file) if config_file.is_file() else None
    return PickleSource(path, tensors, config)


def _load(file: Path) -> dict[str, torch.Tensor]:
    with open(file, "rb") as opened:
        head = opened.read(64)
    is_zip = head.startswith(b"PK\x03\x04")
    if not head:
        raise NotSafetensors(file, "an empty file: an interrupted download? Get it again")
    kind = foreign_kind(head)
    if kind is not None and "pickle" not in kind:
        raise NotSafetensors(file, f"not weights but {kind}")
    try:
        # Only the zip format can be mapped; older pickles are read into memory.
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except (serialization.pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = _reason(error)
        raise NotSafetensors(
            file,
            f"can't be read as plain weights ({reason}). Pickles can run code when they are loaded, so only tensors "
            "are accepted: get the safetensors version of the model",
        ) from error
    return _weights(file, loaded)


def _reason(error: Exception) -> str:
    """One clause of what torch says; its advice to load the file unsafely is left out."""
    text = " ".join(str(error).split())
    if found := re.search(r"GLOBAL ([\w.]+)", text):
        return f"it would run {found[1]}"
    if not text or text.startswith("Weights only load failed"):
        return "it is damaged, or holds more than tensors"
    return re.split(r"\. (?=[A-Z])", text)[0][:160]


def _weights(file: Path, loaded: Any) -> dict[str, torch.Tensor]:
    for name in _NESTS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(name), Mapping):
            loaded = loaded[name]
            break
    tensors = {}
    for name, value in loaded.items() if isinstance(loaded, Mapping) else ():
        if isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided:
            tensors[name] = value.detach()
    if not tensors:
        raise FileError(file, f"holds no tensors by name (a {type(loaded).__name__}); nothing to convert")
    return tensors
