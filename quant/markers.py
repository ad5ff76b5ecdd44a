"""The notes that say how a layer is stored: ComfyUI's marker, its header form, and our own record."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..files import Source
from .errors import QuantError

__all__ = [
    "MARKER",
    "RECORD_KEY",
    "Provenance",
    "checksum",
    "encode_marker",
    "header_claims",
    "parse_marker",
    "read_marker",
    "read_provenance",
]

MARKER = "comfy_quant"
HEADER_KEY = "_quantization_metadata"
RECORD_KEY = "nativedit.quantization"
_MAX_MARKER_BYTES = 64 * 1024


def encode_marker(marker: Mapping[str, Any]) -> torch.Tensor:
    """The bytes that ComfyUI stores as a tensor: json as Python spells it when nothing is asked of it."""
    return torch.tensor(list(json.dumps(dict(marker)).encode("utf-8")), dtype=torch.uint8)


def parse_marker(raw: bytes) -> dict[str, Any] | None:
    """The marker's object; None for an empty one (no bytes, NULs or blanks: "this layer is not quantized").

    Raises ValueError.
    """
    text = raw.strip(b"\0 \t\r\n")
    if not text:
        return None
    try:
        marker = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its marker is not JSON ({str(error)[:100]}): {text[:60]!r}") from None
    if not isinstance(marker, dict):
        raise ValueError(f"its marker is a JSON {type(marker).__name__}, expected an object: {text[:60]!r}")
    return marker


def read_marker(source: Source, key: str) -> dict[str, Any] | None:
    """Reads and parses the marker tensor ``key``. Raises ValueError."""
    info = source.info(key)
    if info.nbytes > _MAX_MARKER_BYTES:
        raise ValueError(f"its marker takes {info.nbytes:,} bytes; a marker is a few dozen")
    return parse_marker(source.read_bytes(key).numpy().tobytes())


def header_claims(source: Source) -> dict[str, dict[str, Any]]:
    """Layer name -> marker object from the headers' ``_quantization_metadata``, spelt with the file's own prefix.

    Raises QuantError when that entry can't be understood.
    """
    claims: dict[str, dict[str, Any]] = {}
    for part in source.parts:
        text = part.metadata.get(HEADER_KEY)
        if text is None:
            continue
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise QuantError(part.path, f"its header's {HEADER_KEY} is not JSON: {str(error)[:100]}") from None
        layers = parsed.get("layers") if isinstance(parsed, dict) else None
        if not isinstance(layers, dict) or not all(isinstance(claim, dict) for claim in layers.values()):
            raise QuantError(
                part.path,
                f"its header has a {HEADER_KEY} without a 'layers' object: it does not say which layers are "
                "quantized. Get the file again from its author",
            )
        claims.update(layers)
    return _in_file_spelling(source, claims)


def _in_file_spelling(source: Source, claims: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Some writers leave out the file's prefix in the header, some keep one that the file has lost."""
    if not claims or all(f"{name}.weight" in source for name in claims):
        return claims
    missing = next(name for name in claims if f"{name}.weight" not in source)
    for key in source:
        if key.endswith(f".{missing}.weight"):
            prefix = key.removesuffix(f"{missing}.weight")
            if all(f"{prefix}{name}.weight" in source for name in claims):
                return {f"{prefix}{name}": claim for name, claim in claims.items()}
    parts = missing.split(".")
    for cut in range(1, len(parts)):
        prefix = ".".join(parts[:cut]) + "."
        shortened = {name.removeprefix(prefix): claim for name, claim in claims.items()}
        if len(shortened) == len(claims) and all(f"{name}.weight" in source for name in shortened):
            return shortened
    return claims


def checksum(data: memoryview | bytes, start: int = 0) -> int:
    """CRC-32 of stored bytes; ``start`` continues an earlier one."""
    return zlib.crc32(data, start)


@dataclass
class Provenance:
    """Our record of how a file was quantized, which stands in its header."""

    format: str = ""
    policy: str = ""
    # Tells the original apart from others: hash of its header and its size.
    source: dict[str, Any] = field(default_factory=dict)
    # Name -> {"marker": {...}, "shape": logical shape, "crc32": hex of the stored weight bytes}.
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Of a file made within a budget: {"budget", "sqnr" in decibels, "policy" that gives it again}.
    plan: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        content = {"version": 1, "format": self.format, "policy": self.policy, "source": self.source}
        if self.plan:
            content["plan"] = self.plan
        return json.dumps({**content, "layers": self.layers}, separators=(",", ":"))


def read_provenance(source: Source) -> Provenance | None:
    """Our own record, or None when the file has none that can be understood (it is only additional evidence)."""
    record: Provenance | None = None
    for part in source.parts:
        try:
            parsed = json.loads(part.metadata.get(RECORD_KEY, "null"))
        except (ValueError, RecursionError):
            continue
        if not isinstance(parsed, dict) or parsed.get("version") != 1 or not isinstance(parsed.get("layers"), dict):
            continue
        layers = {name: layer for name, layer in parsed["layers"].items() if _describes_a_layer(layer)}
        record = record or Provenance(
            str(parsed.get("format", "")), str(parsed.get("policy", "")), parsed.get("source", {})
        )
        if isinstance(parsed.get("plan"), dict):
            record.plan = parsed["plan"]
        record.layers.update(layers)
    return record


def _describes_a_layer(layer: Any) -> bool:
    return (
        isinstance(layer, dict)
        and isinstance(layer.get("marker"), dict)
        and isinstance(layer.get("crc32"), str)
        and isinstance(layer.get("shape"), list)
        and all(type(size) is int for size in layer["shape"])
    )
