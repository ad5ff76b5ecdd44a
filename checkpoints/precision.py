"""In which precision a model file is, from its header, and which of several to prefer."""

from __future__ import annotations

import os
import re
from collections import Counter

from ..files.source import open_source
from ..quant.reader import read_quantized

# Best first: int8 with rotation keeps most of the quality at half the size, float8 mixed keeps its sensitive layers.
ORDER = ("int8_convrot", "fp8_mixed", "fp8", "bf16", "fp16", "nvfp4", "fp32", "other")
_PLAIN = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}
# What file names say, longest words first. A name is believed only where there is no header to ask (not downloaded).
_WORDS = (
    ("int8_convrot", r"int8[_-]?convrot"),
    ("nvfp4", r"nvfp4"),
    ("fp8_mixed", r"fp8[_-]?mixed"),
    ("fp8", r"fp8(?:[_-]?(?:scaled|e4m3fn|e5m2))*"),
    ("bf16", r"bf16"),
    ("fp16", r"fp16"),
    ("fp32", r"fp32"),
)
_WORD = r"(?i)[._-](?:" + "|".join(pattern for _, pattern in _WORDS) + r")(?=[._-]|$)"


def precision_of(path: str | os.PathLike) -> str:
    """One of ``ORDER``; reads headers and markers alone. Raises FileError."""
    with open_source(path) as source:
        found = read_quantized(source)
        formats = Counter(layer.recipe.format for layer in found.layers.values() if layer.dialect != "cast")
        if formats:
            name, _ = formats.most_common(1)[0]
            layers = [layer for layer in found.layers.values() if layer.recipe.format == name]
            if name == "int8_tensorwise":
                return "int8_convrot" if any(layer.recipe.convrot_groupsize for layer in layers) else "other"
            if name.startswith("float8"):
                # Markers per layer: the writer chose which layers to keep. Older files have one mark for all.
                return "fp8_mixed" if all(layer.dialect in ("comfy_quant", "header") for layer in layers) else "fp8"
            return name if name in ORDER else "other"
        sizes: Counter[str] = Counter()
        for info in source.tensors.values():
            sizes[info.dtype] += info.nbytes
        return _PLAIN.get(sizes.most_common(1)[0][0], "other") if sizes else "other"


def precision_in_name(name: str) -> str:
    """What a file's name says; "other" when it says nothing."""
    for precision, pattern in _WORDS:
        if re.search(rf"[._-]{pattern}(?=[._-]|$)", name, re.IGNORECASE):
            return precision
    return "other"


def without_precision(name: str) -> str:
    """A file's name without folder, extension and words for a precision: what its variants have in common."""
    stem = re.split(r"[/\\]", name)[-1]
    stem = re.sub(r"\.(?:safetensors|sft|ckpt|pt|pth|bin|gguf)$", "", stem, flags=re.IGNORECASE)
    return re.sub(_WORD, "", stem).lower()


def rank(precision: str, nvfp4: bool = False) -> int:
    """Smaller is better. nvfp4: the device multiplies in it, and the model's publisher offers it."""
    if precision == "nvfp4" and nvfp4:
        return -1
    return ORDER.index(precision) if precision in ORDER else len(ORDER)


def device_has_nvfp4() -> bool:
    """Blackwell and later: compute capability 10."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10
