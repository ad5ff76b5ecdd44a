"""LoRA files from one layout's names into the other's: layers renamed, split and joined, every key accounted for.

A model that keeps q, k and v in one matrix needs one adapter where another needs three. Splitting is exact: the pieces
share the first factor and divide the rows of the second. Joining is exact too: equal first factors are kept once,
others are stacked, with the second factors on the diagonal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..files.errors import FileError
from ..files.paths import refuse_same_file
from ..files.writer import write_safetensors
from ..supported_models import Architecture, Rule, TwoWayMap, get_architecture
from .lora_keys import SUFFIXES, Names, Place, find_card, is_other_part, names_of, readings, split_key
from .pickles import open_weights

PREFIX = {"comfy": "diffusion_model.", "diffusers": "transformer."}
# Tensors of an adapter whose rows are the layer's output features.
_ROWS = ("up", "dora_scale", "hada_w1_a", "hada_w2_a", "diff", "diff_b")
_SHARED = ("down", "alpha", "hada_w1_b", "hada_w2_b")


@dataclass
class Adapter:
    """What a file holds for one layer, by words that mean the same in every dialect: those of SUFFIXES."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    # Word -> the file's own suffix.
    spelled: dict[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int | None:
        return next((self.tensors[word].shape[0] for word in _ROWS if word in self.tensors), None)

    @property
    def columns(self) -> int | None:
        for word in ("down", "hada_w1_b", "diff"):
            if word in self.tensors:
                return self.tensors[word].shape[1]
        return None


@dataclass
class LoraReport:
    """Counts of layers; ``kept``: keys of other parts, unchanged."""

    destination: str
    architecture: str
    renamed: int = 0
    split: int = 0
    fused: int = 0
    kept: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = f"{self.renamed} layers renamed, {self.split} split, {self.fused} joined"
        return f"{self.destination}: a LoRA of {self.architecture}; {parts}" + (
            f", {len(self.kept)} keys of other parts kept" if self.kept else ""
        )


def convert_lora(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    layout: str,
    architecture: str | None = None,
    model: str | os.PathLike | None = None,
) -> LoraReport:
    """Write a LoRA with the layer names of ComfyUI's files ("comfy") or of diffusers ("diffusers").

    source: safetensors, or a pickle of plain tensors. model: a checkpoint of the model (its header is read) when the
    LoRA alone doesn't tell whose it is or how wide a layer is.
    Raises FileError: not a LoRA, half an adapter, keys that are no layer of the model, an adapter that can't be split;
    OutputError.
    """
    if layout not in PREFIX:
        raise ValueError(f"layout {layout!r} is unknown; known are {', '.join(PREFIX)}")
    refuse_same_file(destination, [source])
    # The layers of one model may all be layers of another too (FLUX.1, Chroma): the checkpoint tells them apart.
    architecture, widths = _of_model(model, architecture)
    with open_weights(source) as opened:
        tensors = {key: opened.read(key) for key in opened}
        metadata = dict(opened.metadata)
    card, adapters, kept = read_adapters(os.fspath(source), tensors, architecture)
    report = LoraReport(os.fspath(destination), card.title, kept=list(kept))
    moved = arrange(os.fspath(source), card, adapters, layout, widths, report)
    result = dict(kept)
    for name, adapter in moved.items():
        for word, tensor in adapter.tensors.items():
            result[f"{PREFIX[layout]}{name}.{adapter.spelled[word]}"] = tensor.contiguous()
    write_safetensors(destination, result, metadata)
    return report


def read_adapters(
    path: str, tensors: Mapping[str, torch.Tensor], architecture: str | None
) -> tuple[Architecture, dict[str, Adapter], dict[str, torch.Tensor]]:
    """(whose, layer as the file names it -> adapter, keys of other parts). Raises FileError."""
    found: dict[str, Adapter] = {}
    kept: dict[str, torch.Tensor] = {}
    strange = []
    for key, tensor in tensors.items():
        parts = split_key(key)
        if is_other_part(key):
            kept[key] = tensor
        elif parts is None:
            strange.append(key)
        else:
            adapter = found.setdefault(parts[0], Adapter())
            word = SUFFIXES[parts[1]]
            adapter.tensors[word] = tensor
            adapter.spelled[word] = parts[1].replace(".default", "")
    if strange or not found:
        raise FileError(path, f"is no LoRA that is understood; keys that fit nothing: {_some(strange) or 'all'}")
    _refuse_halves(path, found)
    card = get_architecture(architecture) if architecture else find_card(found)[0]
    if card is None:
        raise FileError(path, f"is a LoRA of a model that is not known; its first layers: {_some(list(found))}")
    return card, found, kept


def _refuse_halves(path: str, adapters: Mapping[str, Adapter]) -> None:
    """Raises FileError for an adapter without one of its factors, or with factors that don't fit each other."""
    for layer, adapter in adapters.items():
        down, up = adapter.tensors.get("down"), adapter.tensors.get("up")
        if down is None and up is None:
            continue
        if down is None or up is None:
            there = adapter.spelled["up" if down is None else "down"]
            raise FileError(path, f"layer {layer!r} has {there} without its other factor: the file is incomplete")
        if down.ndim < 2 or up.ndim < 2 or down.shape[0] != up.shape[1]:
            shapes = f"{adapter.spelled['down']} {list(down.shape)} and {adapter.spelled['up']} {list(up.shape)}"
            raise FileError(path, f"layer {layer!r} has {shapes}: their ranks differ, so they are not of one adapter")


def placed(path: str, card: Architecture, adapters: Mapping[str, Adapter]) -> dict[Place, Adapter]:
    """Adapters by the layer they are for. Raises FileError that lists those that are for none."""
    names = names_of(card)
    found: dict[Place, Adapter] = {}
    strange = []
    for start, adapter in adapters.items():
        place = _place(names, start)
        if place is None:
            strange.append(start)
        else:
            found[place] = adapter
    if strange:
        raise FileError(path, f"{len(strange)} layers are none of {card.title}: {_some(strange)}")
    return found


def _place(names: Names | None, start: str) -> Place | None:
    if names is None:
        # One name everywhere: the longest prefix that is taken off leaves the layer.
        dotted = [layer for layer in readings(start) if not layer.flat]
        return Place(dotted[0].name, dotted[0].name, None) if dotted and "." in dotted[0].name else None
    return next((place for layer in readings(start) if (place := names.find(layer)) is not None), None)


def arrange(
    path: str,
    card: Architecture,
    adapters: Mapping[str, Adapter],
    layout: str,
    widths: Mapping[str, tuple[int, ...]],
    report: LoraReport,
) -> dict[str, Adapter]:
    """Layer in the wanted layout -> adapter. Raises FileError."""
    places = placed(path, card, adapters)
    two_way = card.two_way
    if two_way is None:
        report.renamed += len(places)
        return {place.name: adapter for place, adapter in places.items()}
    sizes = _Sizes(two_way, places, widths)
    result: dict[str, Adapter] = {}
    pieces: dict[str, dict[int, Adapter]] = {}
    for place, adapter in places.items():
        rule, number = _rule(two_way, place.ours)
        theirs = [name if number is None else name.replace("#", str(number), 1) for name in rule.parts]
        if layout == "diffusers" and place.part is None and place.name == place.ours and place.ours not in theirs:
            _to_theirs(path, place, adapter, rule, theirs, sizes, result, report)
        elif layout == "comfy" and place.part is not None and len(theirs) > 1:
            pieces.setdefault(place.ours, {})[place.part] = adapter
        elif layout == "comfy":
            result[place.ours] = _swapped(adapter) if rule.swapped and place.part is not None else adapter
            report.renamed += 1
        else:
            result[place.name] = adapter
            report.renamed += 1
    for ours, parts in pieces.items():
        result[ours] = _fused(path, ours, parts, sizes.of(path, ours, next(iter(parts.values()))), report)
        report.fused += 1
    return result


def _to_theirs(path, place, adapter, rule, theirs, sizes, result, report) -> None:
    if len(theirs) == 1:
        result[theirs[0]] = _swapped(adapter) if rule.swapped else adapter
        report.renamed += 1
        return
    _refuse_uncuttable(path, place.ours, adapter)
    start = 0
    for name, size in zip(theirs, sizes.of(path, place.ours, adapter), strict=True):
        result[name] = _slice(adapter, start, start + size)
        start += size
    report.split += 1


def _rule(two_way: TwoWayMap, ours: str) -> tuple[Rule, int | None]:
    found = two_way.find_ours(f"{ours}.weight")
    assert found is not None, ours
    return found.rule, found.number


class _Sizes:
    """Rows of the parts of fused layers, from the LoRA itself, from its other blocks, or from a checkpoint."""

    def __init__(self, two_way: TwoWayMap, places: Mapping[Place, Adapter], widths: Mapping[str, tuple[int, ...]]):
        self._two_way = two_way
        self._places = places
        self._widths = widths

    def of(self, path: str, ours: str, adapter: Adapter) -> list[int]:
        rule, _ = _rule(self._two_way, ours)
        count = len(rule.parts)
        first = rule.first.count if rule.first else count
        rest = count - first
        shape = self._widths.get(f"{ours}.weight")
        whole = next((a.rows for p, a in self._places.items() if p.ours == ours and p.part is None), None)
        total = shape[0] if shape else whole
        parts = self._parts(rule)
        # q is as wide as the model in every layer that divides unequally
        head = parts.get(0) or (adapter.columns if rule.first else total // count if total else None)
        if rest == 0:
            head = head or next((parts[i] for i in range(count) if i in parts), None)
            return [head] * count if head else self._unknown(path, ours)
        tail = next((parts[i] for i in range(first, count) if i in parts), None)
        if tail is None and total and head:
            tail = (total - first * head) // rest
        return [head] * first + [tail] * rest if head and tail else self._unknown(path, ours)

    def _parts(self, rule: Rule) -> dict[int, int]:
        """Part -> rows, from any block that has an adapter for it."""
        found: dict[int, int] = {}
        for place, adapter in self._places.items():
            if place.part is not None and adapter.rows and _rule(self._two_way, place.ours)[0] is rule:
                found.setdefault(place.part, adapter.rows)
        return found

    @staticmethod
    def _unknown(path: str, ours: str) -> list[int]:
        raise FileError(path, f"does not tell how wide {ours!r} is; name a checkpoint of the model with --model")


def _refuse_uncuttable(path: str, ours: str, adapter: Adapter) -> None:
    """Raises FileError for kinds of adapters that no rows can be taken of."""
    strange = [word for word in adapter.tensors if word not in (*_ROWS, *_SHARED)]
    dora = adapter.tensors.get("dora_scale")
    if dora is not None and dora.shape[0] != adapter.rows:
        strange.append("dora_scale over the input")
    if strange:
        problem = (
            f"layer {ours!r} has a {strange[0]}, which can't be cut exactly; bake the LoRA into the model (--into)"
        )
        raise FileError(path, problem)


def _slice(adapter: Adapter, start: int, stop: int) -> Adapter:
    """The adapter of some of a layer's rows."""
    tensors = {
        word: tensor[start:stop].clone() if word in _ROWS else tensor for word, tensor in adapter.tensors.items()
    }
    return Adapter(tensors, dict(adapter.spelled))


def _swapped(adapter: Adapter) -> Adapter:
    tensors = {
        word: tensor.roll(tensor.shape[0] // 2, 0) if word in _ROWS else tensor
        for word, tensor in adapter.tensors.items()
    }
    return Adapter(tensors, dict(adapter.spelled))


def _fused(path: str, ours: str, parts: dict[int, Adapter], sizes: list[int], report: LoraReport) -> Adapter:
    """One adapter for a layer of ours from those of its parts; a part without one gets rows of zeros."""
    some = next(iter(parts.values()))
    words = {word for adapter in parts.values() for word in adapter.tensors}
    strange = sorted(words - {"up", "down", "alpha", "diff", "diff_b"})
    if strange:
        raise FileError(
            path,
            f"layer {ours!r} has a {strange[0]}, which can't be joined exactly; bake the LoRA into the model (--into)",
        )
    columns = {adapter.columns for adapter in parts.values() if adapter.columns is not None}
    if len(columns) > 1:
        raise FileError(
            path, f"parts of layer {ours!r} take {sorted(columns)} features; parts of one layer take as many"
        )
    for i, adapter in parts.items():
        if adapter.rows is not None and adapter.rows != sizes[i]:
            raise FileError(
                path,
                f"part {i + 1} of layer {ours!r} has {adapter.rows} rows, {sizes[i]} were expected: of another model?",
            )
    tensors: dict[str, torch.Tensor] = {}
    for word in ("diff", "diff_b"):
        if word in words:
            like = next(adapter.tensors[word] for adapter in parts.values() if word in adapter.tensors)
            rows = [
                parts[i].tensors[word]
                if i in parts and word in parts[i].tensors
                else like.new_zeros(size, *like.shape[1:])
                for i, size in enumerate(sizes)
            ]
            tensors[word] = torch.cat(rows)
    if "up" in words:
        tensors |= _joined(ours, parts, sizes, report)
    spelled = {word: name for adapter in parts.values() for word, name in adapter.spelled.items()}
    return Adapter(tensors, {**some.spelled, **spelled})


def _joined(ours: str, parts: dict[int, Adapter], sizes: list[int], report: LoraReport) -> dict[str, torch.Tensor]:
    pairs = {i: adapter.tensors for i, adapter in parts.items() if "up" in adapter.tensors}
    downs = [tensors["down"] for tensors in pairs.values()]
    alphas = [float(tensors["alpha"]) if "alpha" in tensors else None for tensors in pairs.values()]
    first = next(iter(pairs.values()))
    up = first["up"]
    if all(_same(down, downs[0]) for down in downs) and len(set(alphas)) == 1:
        rows = [pairs[i]["up"] if i in pairs else up.new_zeros(size, up.shape[1]) for i, size in enumerate(sizes)]
        joined = {"down": downs[0], "up": torch.cat(rows)}
        return joined | ({"alpha": first["alpha"]} if "alpha" in first else {})
    # The effective strength is alpha / rank, and the rank grows.
    scales = [1.0 if alpha is None else alpha / down.shape[0] for alpha, down in zip(alphas, downs, strict=True)]
    rank = sum(down.shape[0] for down in downs)
    result = up.new_zeros(sum(sizes), rank)
    column, common = 0, scales[0]
    for (i, tensors), scale in zip(pairs.items(), scales, strict=True):
        own, start = tensors["up"], sum(sizes[:i])
        if scale != common:
            own = (own.float() * (scale / common)).to(own.dtype)
            report.notes.append(f"{ours}: its parts have different strengths; one was scaled, which rounds")
        result[start : start + sizes[i], column : column + own.shape[1]] = own
        column += own.shape[1]
    joined = {"down": torch.cat(downs), "up": result}
    if common != 1.0 or any(alpha is not None for alpha in alphas):
        like = next((tensors["alpha"] for tensors in pairs.values() if "alpha" in tensors), torch.tensor(1.0))
        joined["alpha"] = torch.full_like(like, common * rank)
    return joined


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """By bits: torch compares no float8."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def _of_model(
    model: str | os.PathLike | None, architecture: str | None
) -> tuple[str | None, dict[str, tuple[int, ...]]]:
    """(name of the architecture, our keys and shapes) of a checkpoint."""
    if model is None:
        return architecture, {}
    from .load import recognise
    from .opened import open_checkpoint

    with open_checkpoint(model, component="transformer") as checkpoint:
        match = recognise(checkpoint, architecture=architecture)
        own = {k[len(match.prefix) :]: v for k, v in checkpoint.shapes.items() if k.startswith(match.prefix)}
        return match.architecture.name, match.layout.shapes(own) if match.layout else own


def _some(names: list[Any]) -> str:
    return ", ".join(map(str, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
