"""Numbers that every form of a report shows: sizes by format, quality by block, words for both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .quant_report import KEPT

Layer = Mapping[str, Any]

_SHORT = {"int8_tensorwise:convrot=256": "int8_convrot", "int8_tensorwise:scale=row": "int8_tensorwise"}
_SHORT |= {"convrot_w4a4:convrot=256": "convrot_w4a4"}
_SHORT |= {"asym_w4a8_int8:" + "convrot=256,group=16,codebook=yes": "asym_w4a8_int8"}


@dataclass(frozen=True)
class Share:
    """What one format holds of a model."""

    format: str
    layers: int
    nbytes: int


def shares(data: Mapping[str, Any]) -> list[Share]:
    """Formats by bytes, kept weights and everything else (norms, biases) last."""
    found: dict[str, list[int]] = {}
    for layer in data["layers"]:
        found.setdefault(layer["format"], []).append(layer["bytes_after"])
    kept = found.pop(KEPT, [])
    result = [Share(name, len(sizes), sum(sizes)) for name, sizes in found.items()]
    result.sort(key=lambda share: -share.nbytes)
    if kept:
        result.append(Share(KEPT, len(kept), sum(kept)))
    rest = (data["file_size"] or data["bytes_after"]) - sum(share.nbytes for share in result)
    if rest > 0:
        result.append(Share("other tensors and header", 0, rest))
    return result


@dataclass(frozen=True)
class Block:
    name: str
    layers: tuple[Layer, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer["bytes_after"] for layer in self.layers)

    @property
    def sqnr(self) -> float | None:
        return sqnr_of(self.layers)


def blocks(layers: Sequence[Layer], most: int | None = None) -> list[Block]:
    """Layers by block in the file's order, those outside of blocks last; at most ``most``, neighbours put together."""
    by_name: dict[str, list[Layer]] = {}
    for layer in layers:
        by_name.setdefault(layer["block"], []).append(layer)
    outside = by_name.pop("", [])
    found = [Block(name, tuple(own)) for name, own in sorted(by_name.items(), key=lambda item: _natural(item[0]))]
    per_row = 1 if most is None else math.ceil(len(found) / most)
    if per_row > 1:
        found = [_joined(found[start : start + per_row]) for start in range(0, len(found), per_row)]
    return [*found, Block("outside blocks", tuple(outside))] if outside else found


def in_order(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for block in blocks(layers) for layer in block.layers]


def _natural(name: str) -> tuple[str, int]:
    stack, _, number = name.rpartition(".")
    return stack, int(number)


def _joined(group: Sequence[Block]) -> Block:
    if len(group) == 1:
        return group[0]
    return Block(f"{group[0].name} to {group[-1].name}", tuple(layer for block in group for layer in block.layers))


def sqnr_of(layers: Iterable[Layer]) -> float | None:
    """Decibels over several layers; None when nothing was measured or changed."""
    measured = [layer for layer in layers if "signal" in layer]
    signal, noise = sum(layer["signal"] for layer in measured), sum(layer["noise"] for layer in measured)
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def decibels(value: float | None, layer: Layer | None = None) -> str:
    """ "42.1 dB"; "exact" where nothing was changed, "" where nothing was measured."""
    if value is not None:
        return f"{value:.1f} dB"
    return "exact" if layer is None or "signal" in layer else ""


def size(count: float) -> str:
    for unit, large in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= large:
            return f"{count / large:.2f} {unit}"
    return f"{count:.0f} bytes"


def short(name: str) -> str:
    """A recipe without the switches that its format has anyway."""
    return _SHORT.get(name) or name.replace(",group=16,codebook=yes", "")


def headline(data: Mapping[str, Any]) -> str:
    after = data["file_size"] or data["bytes_after"]
    text = f"{size(data['bytes_before'])} to {size(after)} ({100 * after / max(data['bytes_before'], 1):.0f}%)"
    if data["measured"]:
        text += f", {decibels(data['sqnr'])} signal to noise"
    return text


def wish(data: Mapping[str, Any]) -> str:
    """The budget in words, "" without one."""
    budget = data.get("budget") or {}
    parts = []
    if "target_size" in budget:
        parts.append(f"at most {size(budget['target_size'])}")
    if "min_sqnr" in budget:
        parts.append(f"at least {budget['min_sqnr']:g} dB")
    if "device" in budget:
        parts.append(f"for {budget['device']}")
    if "comfyui" in budget:
        parts.append(f"for ComfyUI {budget['comfyui']}")
    return ", ".join(parts)
