"""PyTorch pickles (.pth, .pt, .bin, .ckpt), read for conversion alone: no code in them is ever run."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..files.dtypes import name_of
from ..files.errors import FileError, NotSafetensors
from ..files.header import Header, TensorInfo
from ..files.source import Source, open_source
from ..files.writer import tensor_bytes
from ..quant.reader import read_quantized
from .opened import Checkpoint
from .stored_config import metadata_of

SUFFIXES = (".pth", ".pt", ".bin", ".ckpt")
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

    def _read(self, name: str, offset: int, count: int) -> torch.Tensor:
        data = tensor_bytes(self._tensors[name])[offset : offset + count]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)

    def close(self) -> None:
        self._tensors = {}
        super().close()


def is_pickle(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in SUFFIXES


@contextmanager
def open_any(path: str | os.PathLike, *, component: str | None = None) -> Iterator[Checkpoint]:
    """``open_checkpoint`` for pickles too. Raises FileError, FileNotFoundError."""
    with _source(Path(path), component) as source:
        quantized = read_quantized(source)
        yield Checkpoint(source, quantized, quantized.logical_shapes(source), metadata_of(source))


def _source(path: Path, component: str | None) -> Source:
    if is_pickle(path):
        return _of_files(path, [path])
    folder = path / component if component is not None and (path / component).is_dir() else path
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        files = _in_folder(folder)
        if files:
            return _of_files(folder, files)
    return open_source(path, component=component)


def _in_folder(folder: Path) -> list[Path]:
    """The pickles that make up the one model of a folder. Raises FileError when there are several."""
    indexes = sorted(file for suffix in SUFFIXES for file in folder.glob(f"*{suffix}.index.json"))
    if indexes:
        with open(indexes[0], encoding="utf-8") as file:
            names = sorted({os.path.basename(name) for name in json.load(file)["weight_map"].values()})
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileError(indexes[0], f"names the shard {missing[0]}, which is not beside it; get the missing file")
        return [folder / name for name in names]
    files = sorted(file for file in folder.iterdir() if is_pickle(file))
    if len(files) > 1:
        raise FileError(folder, f"holds several pickles ({', '.join(f.name for f in files[:4])}); name the one to use")
    return files


def _of_files(path: Path, files: list[Path]) -> PickleSource:
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    for file in files:
        for name, tensor in _load(file).items():
            tensors[name] = (os.fspath(file), tensor)
    folder = path if path.is_dir() else path.parent
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else None
    return PickleSource(path, tensors, config)


def _load(file: Path) -> dict[str, torch.Tensor]:
    with open(file, "rb") as opened:
        is_zip = opened.read(4) == b"PK\x03\x04"
    try:
        # Only the zip format can be mapped; older pickles are read into memory.
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise NotSafetensors(
            file,
            f"can't be read as plain weights ({reason}). Pickles can run code when they are loaded, so only tensors "
            "are accepted: get the safetensors version of the model",
        ) from error
    return _weights(file, loaded)


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
