"""Reads and fully checks the header of a safetensors file; never touches the tensors.

The format: eight bytes with a length, that many bytes of JSON, then the data that the JSON's offsets must cover without
a gap or an overlap.
"""
# The length is little-endian. Source: https://github.com/huggingface/safetensors#format

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from typing import Any

from .dtypes import ELEMENT_BITS, nbytes
from .errors import DamagedFile, FileError, NotSafetensors
from .sniff import foreign_kind

__all__ = ["MAX_HEADER_BYTES", "Header", "TensorInfo", "parse_json_object", "read_header"]

# The largest published headers (experts kept apart, 70 000 tensors) stay below 10 MB.
MAX_HEADER_BYTES = 32 * 1024 * 1024
# Each tensor opens three brackets; beyond this a header is an attack on memory, not a model.
_MAX_BRACKETS = 1_500_000
_MAX_DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header declares it; ``start`` and ``end`` are offsets into the data section.

    ``dtype`` is the safetensors name: "BF16", "F8_E4M3", "U8", ...
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. ``tensors`` is in the order of the JSON; ``data_start`` is the data's offset in the file."""

    path: str
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    data_start: int
    file_size: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}


class _DuplicateKey(ValueError):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _value in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return found


def parse_json_object(path: str | os.PathLike, raw: bytes, what: str) -> dict[str, Any]:
    """An object from untrusted bytes, read strictly: no key twice, and neither depth nor size without bounds.

    Raises DamagedFile, which names the file and what in it was read, such as its header.
    """
    if len(raw) > MAX_HEADER_BYTES or raw.count(b"{") + raw.count(b"[") > _MAX_BRACKETS:
        raise DamagedFile(path, f"its {what} is unreasonably large ({len(raw):,} bytes); refused")
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except UnicodeDecodeError as error:
        raise DamagedFile(path, f"its {what} is not UTF-8 text (byte {error.start})") from None
    except _DuplicateKey as error:
        raise DamagedFile(path, f"its {what} has the key {str(error)[:200]!r} twice") from None
    except RecursionError:
        raise DamagedFile(path, f"its {what} is nested too deeply; refused") from None
    except ValueError as error:
        raise DamagedFile(path, f"its {what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(parsed, dict):
        raise DamagedFile(path, f"its {what} is a JSON {type(parsed).__name__}, expected an object")
    return parsed


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensor_info(path: str, name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict):
        raise DamagedFile(path, f"tensor {name!r} is not described by a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BITS:
        raise DamagedFile(path, f"tensor {name!r} has the unknown element type {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise DamagedFile(path, f"tensor {name!r} has an invalid shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise DamagedFile(path, f"tensor {name!r} has invalid data_offsets {str(offsets)[:80]}")
    start, end = offsets
    try:
        needed = nbytes(dtype, tuple(shape))
    except ValueError as error:
        raise DamagedFile(path, f"tensor {name!r}: {error}") from None
    if end - start != needed:
        raise DamagedFile(
            path, f"tensor {name!r} ({dtype} {shape}) needs {needed:,} bytes but its data_offsets span {end - start:,}"
        )
    return TensorInfo(name, dtype, tuple(shape), start, end)


def _check_layout(path: str, tensors: dict[str, TensorInfo], data_size: int) -> None:
    """Offsets must cover the data exactly: no gap, no overlap, nothing missing, nothing left over."""
    position = 0
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if info.start != position:
            problem = "overlaps the one before it" if info.start < position else "leaves a gap before it"
            raise DamagedFile(path, f"the data of tensor {info.name!r} {problem} (offset {info.start:,})")
        position = info.end
    if position > data_size:
        raise DamagedFile(
            path,
            f"{position - data_size:,} bytes are missing at the end: the download or copy was interrupted. "
            "Get the file again",
        )
    if position < data_size:
        raise DamagedFile(path, f"{data_size - position:,} bytes follow the last tensor; a valid file has none")


def read_header(path: str | os.PathLike) -> Header:
    """Read and check the header of ``path`` in bounded time and memory, whatever the file holds.

    Raises FileNotFoundError; NotSafetensors (says what the file is and what to do); DamagedFile (a safetensors file
    with a header that lies). Reads 8 bytes plus the header.
    """
    path = os.fspath(path)
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise NotSafetensors(path, "a folder, expected one .safetensors file")
    if not stat.S_ISREG(status.st_mode):
        raise NotSafetensors(path, "not a regular file")
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(64)
        _refuse_foreign(path, head, size)
        length = int.from_bytes(head[:8], "little")
        file.seek(8)
        raw = _read_exactly(file, path, length)
    parsed = parse_json_object(path, raw, "header")
    metadata = parsed.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFile(path, "its header's __metadata__ is not a map of texts")
    tensors = {name: _tensor_info(path, name, entry) for name, entry in parsed.items()}
    _check_layout(path, tensors, size - 8 - length)
    return Header(path, metadata, tensors, 8 + length, size)


def _refuse_foreign(path: str, head: bytes, size: int) -> None:
    if size == 0:
        raise NotSafetensors(path, "an empty file: an interrupted download? Get it again")
    length = int.from_bytes(head[:8], "little") if len(head) >= 8 else -1
    if 2 <= length <= min(size - 8, MAX_HEADER_BYTES) and head[8:9] == b"{":
        return
    kind = foreign_kind(head)
    if kind is not None:
        raise NotSafetensors(path, f"not a safetensors file but {kind}.")
    if len(head) < 8:
        raise NotSafetensors(path, f"only {size} bytes long: not a safetensors file")
    if head[8:9] == b"{" and length > size - 8:
        raise DamagedFile(
            path,
            f"its header claims {length:,} bytes but only {size - 8:,} follow: the file is cut off or not safetensors. "
            "Get it again",
        )
    if head[8:9] == b"{" and length > MAX_HEADER_BYTES:
        raise DamagedFile(path, f"its header claims {length:,} bytes; refused (limit {MAX_HEADER_BYTES:,})")
    raise NotSafetensors(path, "not a safetensors file (its first bytes are no header of one)")


def _read_exactly(file, path: str, count: int) -> bytes:
    parts = []
    while count:
        part = file.read(count)
        if not part:
            raise FileError(path, "ended while its header was being read")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
