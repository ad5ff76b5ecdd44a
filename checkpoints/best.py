"""The best of several files: by precision among variants of one model, and among the files of an architecture."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..autoencoders import find_autoencoder
from ..supported_models import Architecture, find_architecture, get_architecture
from ..text_encoders.families import find_text_encoder
from .opened import Checkpoint, open_checkpoint
from .precision import device_has_nvfp4, precision_in_name, precision_of, rank
from .roots import Found, ModelRoots

# Kinds of files that an architecture is a model of; the others belong to it.
MODELS = ("diffusion_models", "checkpoints")


@dataclass(frozen=True)
class Resolved:
    """``precision``: see precision.ORDER; "" when the file was named exactly; ``how``: for people; ``file``: its place
    among the models, None for a path outside of them."""

    path: Path
    how: str
    precision: str = ""
    file: Found | None = None


def best_of(files: Iterable[Found], listed: Iterable[str]) -> Resolved | None:
    """The best precision wins; between equals the first in the order of the folders. listed: what the publisher
    offers."""
    ranked = []
    for number, file in enumerate(files):
        try:
            precision = precision_of(file.path)
        except (OSError, ValueError):  # damaged, or a pickle: not to be chosen for anybody
            continue
        offered = any(precision_in_name(name) == "nvfp4" for name in listed)
        ranked.append((rank(precision, offered and device_has_nvfp4()), number, precision, file))
    if not ranked:
        return None
    _, _, precision, file = min(ranked, key=lambda entry: entry[:2])
    others = len(ranked) - 1
    how = f"in {file.kind}, {precision}" + (f", the best of {others + 1} variants" if others else "")
    return Resolved(file.path, how, precision, file)


def best_of_architecture(roots: ModelRoots, kinds: Iterable[str], card: Architecture) -> Resolved | None:
    """Among files of these kinds: those that the card names, else any whose header says so."""
    kinds = list(kinds)
    files = [file for kind in kinds for file in roots.files(kind)]
    known = {name.lower() for kind in kinds for name in card.files.get(kind, ())}
    listed = {name for kind in kinds for name in card.files.get(kind, ())}
    by_name = [file for file in files if file.name.rpartition("/")[2].lower() in known]
    return best_of(by_name, listed) or best_of([file for file in files if _is_of(file, card)], listed)


def _is_of(file: Found, card: Architecture) -> bool:
    try:
        state = file.path.stat()
    except OSError:
        return False
    return _header_is_of(os.fspath(file.path), (state.st_size, state.st_mtime_ns), file.kind, card.name)


@functools.lru_cache(maxsize=4096)
def _header_is_of(path: str, state: tuple[int, int], kind: str, name: str) -> bool:
    """state: only tells one version of the file from another."""
    try:
        with open_checkpoint(path) as checkpoint:
            return _fits(checkpoint, kind, get_architecture(name))
    except (OSError, ValueError):  # a file that can't be read is none of the candidates
        return False


def _fits(checkpoint: Checkpoint, kind: str, card: Architecture) -> bool:
    if kind == "text_encoders":
        return any(
            family.name in card.text_encoders and card.text_encoder_width in (None, config.get("hidden_size"))
            for family, _, config in find_text_encoder(checkpoint.shapes, checkpoint.metadata)
        )
    if kind == "vae":
        found = find_autoencoder(checkpoint.shapes)
        return found is not None and found.autoencoder.name == card.autoencoder
    match = find_architecture(checkpoint.shapes, metadata=checkpoint.metadata)
    return match is not None and match.architecture is card
