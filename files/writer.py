"""Writes a safetensors file one tensor, or one run of rows, at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping

import torch

from .atomic import AtomicFile
from .dtypes import RANK, name_of, nbytes
from .errors import OutputError
from .header import MAX_HEADER_BYTES, TensorInfo
from .paths import refuse_same_file

__all__ = ["SafetensorsWriter", "encode_header", "tensor_bytes", "write_safetensors"]


def encode_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorInfo]]:
    """The bytes before the data (length included) and where each tensor goes.

    Same order and spelling as the safetensors library's own writer: widest element type first, then by name, so that
    every tensor is aligned in the file and equal content gives equal files.
    """
    ordered = sorted(entries, key=lambda entry: (-RANK[entry[1]], entry[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    placed: dict[str, TensorInfo] = {}
    position = 0
    for name, dtype, shape in ordered:
        if name in placed or name == "__metadata__":
            raise ValueError(f"two tensors are named {name!r}" if name in placed else "a tensor can't be __metadata__")
        end = position + nbytes(dtype, shape)
        placed[name] = TensorInfo(name, dtype, tuple(shape), position, end)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header would take {len(text):,} bytes; the limit is {MAX_HEADER_BYTES:,}")
    return len(text).to_bytes(8, "little") + text, placed


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The stored bytes of a CPU tensor as a flat view, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


class SafetensorsWriter:
    """``with SafetensorsWriter(path, entries, metadata) as w: w.write(name, tensor)`` in any order.

    ``entries`` are (name, safetensors dtype, shape): the header is fixed in advance, so nothing is held in memory.
    Leaving the block checks that every tensor is complete, syncs, and puts the file in place of ``path``; any
    exception, KeyboardInterrupt too, leaves ``path`` as it was. ``sources`` are files that ``path`` must not be.
    Raises OutputError.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        entries: Iterable[tuple[str, str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
        *,
        sources: Iterable[str | os.PathLike] = (),
    ):
        self.path = os.fspath(path)
        refuse_same_file(self.path, sources)
        self._head, self.tensors = encode_header(entries, metadata)
        self._file = AtomicFile(self.path)
        self._left = {name: info.nbytes for name, info in self.tensors.items()}
        self.file_size = len(self._head) + sum(self._left.values())

    def __enter__(self) -> SafetensorsWriter:
        self._file.__enter__()
        try:
            self._file.reserve(self.file_size)
            self._file.write_at(0, self._head)
        except BaseException as error:
            self._file.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            missing = [name for name, left in self._left.items() if left]
            if missing:
                error = OutputError(self.path, f"{len(missing)} tensors were not written, the first is {missing[0]!r}")
                self._file.__exit__(OutputError, error, None)
                raise error
        self._file.__exit__(kind, value, traceback)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor; its dtype and shape must be those announced."""
        info = self.tensors[name]
        if tensor.device.type == "meta":
            raise OutputError(self.path, f"tensor {name!r} has no data (it is on the meta device); load it first")
        if (name_of(tensor.dtype), tuple(tensor.shape)) != (info.dtype, info.shape):
            raise OutputError(
                self.path,
                f"tensor {name!r} is {name_of(tensor.dtype)} {list(tensor.shape)}, "
                f"announced was {info.dtype} {list(info.shape)}",
            )
        self.write_bytes(name, tensor_bytes(tensor.cpu()))

    def write_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Write rows ``start:start + len(rows)`` of the first dimension. Every row is to be written once."""
        info = self.tensors[name]
        if name_of(rows.dtype) != info.dtype or tuple(rows.shape[1:]) != info.shape[1:]:
            raise OutputError(self.path, f"rows of {name!r} are {rows.dtype} {list(rows.shape)}, expected {info}")
        if start + rows.shape[0] > info.shape[0]:
            raise OutputError(self.path, f"tensor {name!r} has no row {start + rows.shape[0] - 1}")
        row = info.nbytes // info.shape[0] if info.shape[0] else 0
        self.write_bytes(name, tensor_bytes(rows.cpu()), start * row)

    def replace_metadata(self, metadata: Mapping[str, str]) -> None:
        """Rewrite the header with metadata of the same encoded length (checksums are known only at the end)."""
        entries = [(info.name, info.dtype, info.shape) for info in self.tensors.values()]
        head, _ = encode_header(entries, metadata)
        if len(head) != len(self._head):
            raise ValueError(f"the new header takes {len(head)} bytes, reserved were {len(self._head)}")
        self._file.write_at(0, head)
        self._head = head

    def write_bytes(self, name: str, data: memoryview | bytes, offset: int = 0) -> None:
        """Write stored bytes of ``name`` at ``offset`` within it."""
        info = self.tensors[name]
        if offset + len(data) > info.nbytes or len(data) > self._left[name]:
            raise OutputError(self.path, f"more bytes than tensor {name!r} has room for ({info.nbytes:,})")
        self._file.write_at(len(self._head) + info.start + offset, data)
        self._left[name] -= len(data)


def write_safetensors(
    path: str | os.PathLike, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors held in memory, atomically. Tied tensors are written under each of their names."""
    entries = [(name, name_of(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    with SafetensorsWriter(path, entries, metadata) as writer:
        for name in writer.tensors:
            writer.write(name, tensors[name])
