"""Finding cards (by listing this folder) and finding the card of a file (by its keys and shapes)."""

from __future__ import annotations

import difflib
import functools
import json
import logging
import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ._architecture import Architecture, Match, Shapes

log = logging.getLogger(__name__)

# Where a diffusion model's keys start in the files people have.
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "model.model.", "transformer.", "model.", "net.")

# The header's entry in files that we write.
ARCHITECTURE_ENTRY = "nativedit.architecture"


@functools.cache
def architectures() -> tuple[Architecture, ...]:
    """All cards that import, by name. A card that fails disables its architecture alone, with one warning."""
    found = []
    for info in pkgutil.iter_modules(import_module(__package__).__path__):
        if info.name.startswith("_"):
            continue
        try:
            found.append(import_module(f".{info.name}", __package__).ARCHITECTURE)
        except Exception as error:  # whatever a broken card raises must not take the others down
            log.warning("NativeDiT: architecture %s is disabled, its card does not import: %r", info.name, error)
    return tuple(sorted(found, key=lambda card: card.name))


def get_architecture(name: str) -> Architecture:
    """The card called ``name``. Raises ValueError that lists the closest known names."""
    cards = {card.name: card for card in architectures()}
    if name in cards:
        return cards[name]
    close = difflib.get_close_matches(name, cards, n=3, cutoff=0.3) or sorted(cards)
    raise ValueError(f"unknown architecture {name!r}; the closest known: {', '.join(close)}")


def find_architecture(
    shapes: Shapes,
    *,
    prefix: str | None = None,
    metadata: Mapping[str, str] | None = None,
    architecture: str | None = None,
) -> Match | None:
    """Whose file is this? Keys and shapes decide; the header's ``config`` entry then beats the card's constants.

    shapes: key -> logical shape; prefix: where the diffusion model's keys start, None = try the known ones;
    architecture: ask only this card. None when nobody claims the file. Never raises on a strange file, only on an
    unknown ``architecture``.
    """
    cards = architectures() if architecture is None else (get_architecture(architecture),)
    for start in PREFIXES if prefix is None else (prefix,):
        for card in cards:
            found = card.match(shapes, start)
            if found is not None:
                found.config.update(header_config(metadata))
                return found
    return None


def prompt_readers(
    family: str, width: int | None = None, metadata: Mapping[str, str] | None = None
) -> list[Architecture]:
    """The cards whose prompts a text encoder of this family encodes; several where nothing tells them apart.

    width: its hidden size; metadata: of its header, whose `nativedit.architecture` says it outright.
    """
    cards = [card for card in architectures() if card.prompt is not None and family in card.text_encoders]
    named = [card for card in cards if card.name == (metadata or {}).get(ARCHITECTURE_ENTRY)]
    return named or [card for card in cards if card.text_encoder_width == width] or cards


def header_config(metadata: Mapping[str, str] | None, component: str = "transformer") -> dict[str, Any]:
    """Constructor arguments from a safetensors header's ``config``: JSON per component, as LTX files carry it."""
    try:
        config = json.loads((metadata or {}).get("config", "{}")).get(component, {})
    except (ValueError, AttributeError):
        return {}
    return {k: v for k, v in config.items() if not k.startswith("_")} if isinstance(config, dict) else {}


def closest_architectures(shapes: Shapes, count: int = 3) -> list[str]:
    """Names of the cards that share most with a file nobody claims, best first; for messages.

    What counts: the card's telling keys that the file has, and the file's keys that the card's map to another layout
    knows on either side."""
    # With a dot in front, so that `blocks.0` is not found in `solo_blocks.0`.
    tails = {f".{key.removesuffix('.weight')}" for key in shapes}

    def shared(card: Architecture) -> float:
        hits = sum(any(tail.endswith(f".{key.removesuffix('.weight')}") for tail in tails) for key in card.signature)
        return hits / max(len(card.signature), 1) + _known_keys(card, shapes)

    scored = sorted(((shared(card), card.name) for card in architectures()), key=lambda pair: (-pair[0], pair[1]))
    return [name for score, name in scored[:count] if score > 0]


def _known_keys(card: Architecture, shapes: Shapes) -> float:
    """The part of a file's keys that the card's map knows, in the layout and under the prefix that fit best."""
    two_way = card.two_way
    if two_way is None or not shapes:
        return 0.0
    best = 0
    for prefix in PREFIXES:
        own = [key[len(prefix) :] for key in shapes if key.startswith(prefix)]
        best = max(
            best, *(sum(find(key) is not None for key in own) for find in (two_way.find_ours, two_way.find_theirs))
        )
    return best / len(shapes)
