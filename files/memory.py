"""Tensors in memory with the two faces of a file: a source to read from, and a place that is written to in pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from .dtypes import name_of, nbytes, torch_dtype
from .errors import OutputError
from .header import Header, TensorInfo
from .source import Source
from .writer import tensor_bytes

__all__ = ["Lazy", "MemoryWriter", "TensorSource"]


@dataclass(frozen=True)
class Lazy:
    """A tensor that ``make()`` gives when it is asked for, and whose dtype and shape are known before."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]


class TensorSource(Source):
    """Tensors in memory, or made when asked for (one at a time is kept), read like weights on disk.

    ``path`` only names them in messages. Tensors given as such are handed out as they are, not copied: whoever reads
    must not write to them.
    """

    def __init__(
        self, path: str, tensors: Mapping[str, torch.Tensor | Lazy], metadata: Mapping[str, str] | None = None
    ):
        infos, position = {}, 0
        for name, tensor in tensors.items():
            dtype, shape = name_of(tensor.dtype), tuple(tensor.shape)
            end = position + nbytes(dtype, shape)
            infos[name] = TensorInfo(name, dtype, shape, position, end)
            position = end
        super().__init__(path, [Header(path, dict(metadata or {}), infos, 0, position)])
        self._given = dict(tensors)
        self._last: tuple[str, torch.Tensor] | None = None
        self._making = threading.Lock()

    @property
    def paths(self) -> tuple[str, ...]:
        """No files."""
        return ()

    def read(self, name: str) -> torch.Tensor:
        self.info(name)
        with self._making:
            if self._last is None or self._last[0] != name:
                given = self._given[name]
                self._last = None  # before the next one is made, so that two are never held
                tensor = given.make() if isinstance(given, Lazy) else given
                self._last = (name, tensor.detach().to("cpu").contiguous())
            return self._last[1]

    def _read(self, name: str, offset: int, count: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """What is in memory already is shown where it lies; ``into`` is not needed."""
        if count == 0:
            return torch.empty(0, dtype=torch.uint8)
        first = offset - self.tensors[name].start
        return self.read(name).reshape(-1).view(torch.uint8)[first : first + count]


class MemoryWriter:
    """Takes what `SafetensorsWriter` takes and keeps it: ``tensors`` are complete when everything was written.

    ``entries`` are (name, safetensors dtype, shape).
    """

    def __init__(self, entries: Iterable[tuple[str, str, tuple[int, ...]]]):
        self.tensors: dict[str, torch.Tensor] = {}
        self._bytes: dict[str, memoryview] = {}
        for name, dtype, shape in entries:
            if name in self.tensors:
                raise ValueError(f"two tensors are named {name!r}")
            self.tensors[name] = torch.empty(shape, dtype=torch_dtype(dtype))
            self._bytes[name] = tensor_bytes(self.tensors[name])

    def write_bytes(self, name: str, data: memoryview | bytes, offset: int = 0) -> None:
        room = self._bytes[name]
        if offset + len(data) > len(room):
            raise OutputError("memory", f"more bytes than tensor {name!r} has room for ({len(room):,})")
        room[offset : offset + len(data)] = data
