"""Says what a file that is not safetensors is, from its first bytes, and what to do with it."""

from __future__ import annotations

import re

__all__ = ["foreign_kind"]

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer: a small text that stands for the real file. Download the file itself "
        "(`git lfs pull`, or the download button of the model page)",
    ),
    (b"GGUF", "a GGUF file. Load it with a GGUF loader node, or get the safetensors version of the model"),
    (
        b"PK\x03\x04",
        "a zip archive, most likely a PyTorch pickle (.pt, .pth, .ckpt, .bin). Pickles can run code when they are "
        "loaded: get the safetensors version, or turn it into one with `nativedit convert`",
    ),
    (b"\x89HDF\r\n", "an HDF5 file (Keras weights). Get the safetensors version of the model"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x1f\x8b", "a gzip archive. Unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive. Unpack it first"),
    (b"Rar!", "a rar archive. Unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive. Unpack it first"),
    (b"\x08\x00\x00\x00\x12", "an ONNX or TensorFlow file. Get the safetensors version of the model"),
)
_HTML = rb"(?i)\s*<(!doctype|html|\?xml|head|body)"


def foreign_kind(head: bytes) -> str | None:
    """What the file is ("a GGUF file. ..."), or None when its first bytes (64 are enough) name no known kind."""
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if len(head) > 2 and head[0] == 0x80 and head[1] in (2, 3, 4, 5) and head[2:3] in (b"\x8a", b"}", b"c", b"\x95"):
        return (
            "a PyTorch pickle (.pt, .pth, .ckpt, .bin). Pickles can run code when they are loaded: get the "
            "safetensors version, or turn it into one with `nativedit convert`"
        )
    if re.match(_HTML, head):
        return "a web page: the download was answered with a page (login or licence?) and not with the file"
    if re.match(rb"\s*[{\[]\s*[\"{\[\]}]", head):
        return "a JSON text (a workflow, a config or a shard index?), not weights"
    return None
