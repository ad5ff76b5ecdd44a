"""The names in LoRA files: which layer of which model a key means, whatever trainer wrote it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..supported_models import Architecture, TwoWayMap, architectures

# What may follow a layer's name, and what it is called here.
SUFFIXES = {
    "lora_A.weight": "down",
    "lora_A.default.weight": "down",
    "lora_down.weight": "down",
    "lora.down.weight": "down",
    "lora_linear_layer.down.weight": "down",
    "lora_B.weight": "up",
    "lora_B.default.weight": "up",
    "lora_up.weight": "up",
    "lora.up.weight": "up",
    "lora_linear_layer.up.weight": "up",
    "alpha": "alpha",
    "dora_scale": "dora_scale",
    "lora_magnitude_vector.weight": "dora_scale",
    **{name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
    **{name: name for name in ("lokr_w1", "lokr_w2", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2")},
    "diff": "diff",
    "diff_b": "diff_b",
}
_SUFFIX = r"\.(" + "|".join(re.escape(name) for name in sorted(SUFFIXES, key=len, reverse=True)) + r")$"
# In front of names with dots, longest first; and in front of names whose dots became underscores.
DOTTED = (
    "base_model.model.transformer.",
    "base_model.model.diffusion_model.",
    "base_model.model.",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "",
)
FLAT = ("lora_unet_", "lora_transformer_", "lycoris_")
_OTHER_PART = r"^(?:lora_te\d?_|text_encoders?(?:_\d)?\.|te\d?\.|clip_[lg]\.|vae\.)"


@dataclass(frozen=True)
class Layer:
    """A layer as a file names it: ``name`` after the prefix; ``flat``: its dots are underscores."""

    name: str
    flat: bool


def split_key(key: str) -> tuple[str, str] | None:
    """(all before the suffix, the suffix as the file spells it), None for a key that is no adapter's."""
    match = re.search(_SUFFIX, key)
    return (key[: match.start()], match[1]) if match else None


def is_other_part(key: str) -> bool:
    """Whether a key is about a text encoder or an autoencoder, which conversion leaves alone."""
    return re.match(_OTHER_PART, key) is not None


def readings(start: str) -> list[Layer]:
    """What the text before a suffix may mean, likeliest first."""
    found = [Layer(start[len(prefix) :], False) for prefix in DOTTED if start.startswith(prefix)]
    found += [Layer(start[len(prefix) :], True) for prefix in FLAT if start.startswith(prefix)]
    return found


@dataclass(frozen=True)
class Place:
    """A layer in our layout (``ours``: its name) or, for ``part`` not None, the part-th of diffusers' inside it."""

    name: str
    ours: str
    part: int | None


class Names:
    """Layer names of one model in both layouts, with dots and with underscores."""

    def __init__(self, two_way: TwoWayMap):
        self._two_way = two_way
        self._flat: list[tuple[str, str]] = []
        for rule in two_way.rules:
            for name in (rule.ours, *rule.parts):
                if rule.params:
                    pattern = re.escape(name.replace(".", "_")).replace(r"\#", r"(\d+)")
                    self._flat.append((pattern, name))

    def find(self, layer: Layer) -> Place | None:
        name = layer.name if not layer.flat else self._dotted(layer.name)
        if name is None:
            return None
        key = f"{name}.weight"
        theirs = self._two_way.find_theirs(key)
        ours = self._two_way.find_ours(key)
        if ours is not None:
            return Place(name, name, None)
        if theirs is None or not theirs.rule.params:
            return None
        number = "" if theirs.number is None else str(theirs.number)
        return Place(name, theirs.rule.ours.replace("#", number, 1), theirs.part)

    def _dotted(self, flat: str) -> str | None:
        for pattern, name in self._flat:
            match = re.fullmatch(pattern, flat)
            if match:
                return name.replace("#", match[1], 1) if match.groups() else name
        return None


def names_of(card: Architecture) -> Names | None:
    """None for an architecture whose layers have one name everywhere."""
    return None if card.two_way is None else _names(card.two_way)


_names = functools.cache(Names)


def find_card(starts: Iterable[str]) -> tuple[Architecture | None, int]:
    """(the card that knows most of these layers, how many it knows); the first reading that fits counts."""
    starts = list(starts)
    best, most = None, 0
    for card in architectures():
        names = names_of(card)
        if names is None:
            continue
        known = sum(any(names.find(layer) is not None for layer in readings(start)) for start in starts)
        if known > most:
            best, most = card, known
    return best, most
