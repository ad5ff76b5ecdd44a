"""Safetensors files of full size that take no room: a real header, and a body of holes that read as zeros."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path


def write_hollow(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """bfloat16 tensors of these shapes. The file system has to know holes."""
    header, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path
