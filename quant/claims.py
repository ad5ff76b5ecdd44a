"""What is said about one layer: the notes in the file, read leniently, and all other evidence beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..files import TensorInfo

__all__ = ["Claim", "Evidence", "Unsettled", "read_claim"]


class Unsettled(ValueError):
    """``kind`` as in Problem; ``conflict``: our own record contradicts the marker, a checksum can settle it."""

    def __init__(self, kind: str, message: str, *, conflict: bool = False):
        super().__init__(message)
        self.kind = kind
        self.conflict = conflict


@dataclass(frozen=True)
class Evidence:
    """All that a file says about one layer, weights unread.

    ``infos`` canonical suffix -> TensorInfo; ``marker`` parsed (None: none, or an empty one; ``has_marker`` tells);
    ``header`` its entry of ``_quantization_metadata``; ``record`` our own; ``legacy_length`` elements of the
    ``scaled_fp8`` tensor above it; ``overruled``: the marker given is the record's, proven by checksum.
    """

    name: str
    infos: Mapping[str, TensorInfo]
    bias: TensorInfo | None = None
    has_marker: bool = False
    marker: dict[str, Any] | None = None
    header: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    legacy_length: int | None = None
    spelled_legacy: bool = False
    overruled: bool = False


@dataclass(frozen=True)
class Claim:
    """A marker, read leniently: switches at the top level or under "params"."""

    format: str | None = None
    convrot: bool | None = None
    convrot_groupsize: int | None = None
    group_size: int | None = None
    linear_dtype: str | None = None
    full_precision: bool = False
    experts: int | None = None

    @property
    def rotation(self) -> int | None:
        """The width of the rotation it names; 256 where it only says that there is one."""
        return (self.convrot_groupsize or 256) if self.convrot else None


def read_claim(marker: Mapping[str, Any] | None) -> Claim | None:
    if marker is None:
        return None
    params = marker.get("params")
    merged = {**params, **marker} if isinstance(params, Mapping) else dict(marker)
    name = merged.get("format")
    if name is not None and not isinstance(name, str):
        raise Unsettled("damaged", f"its marker's format is {name!r}, expected a name")
    return Claim(
        name,
        _switch(merged, "convrot", bool),
        _switch(merged, "convrot_groupsize", int),
        _switch(merged, "group_size", int),
        _switch(merged, "linear_dtype", str),
        bool(_switch(merged, "full_precision_matrix_mult", bool)),
        _switch(merged, "num_experts", int),
    )


def _switch(marker: Mapping[str, Any], key: str, kind: type) -> Any:
    value = marker.get(key)
    if value is None:
        return None
    if type(value) is not kind:
        raise Unsettled("damaged", f"its marker says {key}={value!r}, expected a {kind.__name__}")
    return value
