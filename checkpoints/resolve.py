"""The file that a name means: an explicit path, a place in ComfyUI's folders, the best variant that is there."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.errors import FileError
from ..supported_models import AUTO, Architecture, architectures, get_architecture
from .best import MODELS, Resolved, best_of, best_of_architecture
from .download import fetch
from .precision import device_has_nvfp4, precision_in_name, rank, without_precision
from .roots import EXTENSIONS, Found, ModelRoots, kind_of_folder, open_roots

# Kinds that are asked first when the caller names none.
_FIRST = ("diffusion_models", "checkpoints", "text_encoders", "vae", "loras")


class Unresolved(FileError):
    """No file fits a name, or several do."""


def resolve(
    name: str | os.PathLike,
    *,
    models_dir: str | os.PathLike,
    folder: str | None = None,
    override: str | os.PathLike | None = None,
    extra_paths: str | os.PathLike | None = None,
    download: bool = False,
    endpoint: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Resolved:
    """The file that ``name`` means.

    In this order: ``override`` (a path); ``name`` as a path of its own; as a path under one of the folders of
    ``folder`` (ComfyUI's name: "diffusion_models", ...; None = all), ``\\`` read as ``/``; as a file in one of their
    subfolders; a variant of the same model in another precision, or, for the name of an architecture, any file of it,
    the best precision first. With ``download`` and nothing local, the best file that the card knows an address of.
    Raises Unresolved (several candidates; none: where was looked, what is similar, what could be downloaded).
    """
    if override is not None:
        return Resolved(_existing(Path(override)), "named explicitly")
    roots = open_roots(models_dir, extra_paths)
    text = os.fspath(name)
    if (direct := Path(text)).is_absolute() and direct.exists():
        return Resolved(direct, "a path")
    wanted = _parts(text)
    kinds = [kind_of_folder(folder)] if folder else _kinds(roots)
    for search in (_at_place, _in_subfolders):
        found = search(roots, kinds, wanted)
        if found is not None:
            return Resolved(found.path, f"in {found.kind}", file=found)
    card = next((card for card in architectures() if card.name == text), None)
    if card is not None:
        kinds = kinds if folder else [kind for kind in kinds if kind in MODELS]
        best = best_of_architecture(roots, kinds, card)
    else:
        best = _variant(roots, kinds, text)
    if best is not None:
        return best
    if download:
        return Resolved(_download(roots, kinds, card, text, endpoint, progress), "downloaded")
    raise Unresolved(text, _nothing(roots, kinds, card, text))


def resolve_auto(roots: ModelRoots, kind: str, architecture: str) -> Resolved:
    """What "auto" means in a loader: the best local file of a kind ("diffusion_models", "text_encoders", "vae") for an
    architecture. Nothing is downloaded. Raises Unresolved, ValueError (no architecture)."""
    if architecture == AUTO:
        raise ValueError(f"file 'auto' is the best file of an architecture in {kind}: choose the architecture too")
    card = get_architecture(architecture)
    kinds = list(MODELS) if kind in MODELS else [kind]
    best = best_of_architecture(roots, kinds, card)
    if best is None:
        raise Unresolved(f"auto for {card.title}", _nothing(roots, kinds, card, architecture))
    return best


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    return path


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[/\\]", name) if part not in ("", ".")]


def _kinds(roots: ModelRoots) -> list[str]:
    kinds = roots.kinds()
    return [*(kind for kind in _FIRST if kind in kinds), *(kind for kind in kinds if kind not in _FIRST)]


def _at_place(roots: ModelRoots, kinds: list[str], wanted: list[str]) -> Found | None:
    """``sub/file.safetensors`` under a folder of the kind; ``diffusion_models/sub/file`` and ``models/...`` too."""
    if ".." in wanted:
        return None
    for kind in kinds:
        for folder in roots.folders(kind):
            for skip in (0, 1, 2):
                rest = wanted[skip:]
                if not rest or (skip and kind_of_folder(wanted[skip - 1]) != kind):
                    continue
                path = folder.joinpath(*rest)
                if path.is_file():
                    return Found(kind, "/".join(rest), path)
    return None


def _in_subfolders(roots: ModelRoots, kinds: list[str], wanted: list[str]) -> Found | None:
    """The only file of that name, wherever it lies below. Raises Unresolved when there are several."""
    if not wanted or not wanted[-1].lower().endswith(EXTENSIONS):
        return None
    for kind in kinds:
        found = [file for file in roots.files(kind) if _parts(file.name)[-len(wanted) :] == wanted]
        if not found:
            found = [file for file in roots.files(kind) if _parts(file.name)[-1].lower() == wanted[-1].lower()]
        if len({os.path.realpath(file.path) for file in found}) > 1:
            names = ", ".join(sorted(f"{file.kind}/{file.name}" for file in found))
            raise Unresolved("/".join(wanted), f"is ambiguous: {names}; write one of these")
        if found:
            return found[0]
    return None


def _variant(roots: ModelRoots, kinds: list[str], name: str) -> Resolved | None:
    """The same model in another precision."""
    base = without_precision(name)
    found = [file for kind in kinds for file in roots.files(kind) if without_precision(file.name) == base]
    # Asked for without its ending, a file that is there is meant itself.
    found = [file for file in found if Path(file.name).stem == _parts(name)[-1]] or found
    listed = {known for card in architectures() for known in card.downloads if without_precision(known) == base}
    return best_of(found, listed)


def _downloads(kinds: list[str], card: Architecture | None, name: str) -> list[tuple[str, str, str]]:
    """(folder, file, address) that would do, best first."""
    cards = [card] if card is not None else list(architectures())
    wanted, base = _parts(name)[-1] if _parts(name) else "", without_precision(name)
    found = []
    for one in cards:
        for folder, names in one.files.items():
            if folder not in kinds:
                continue
            for number, file in enumerate(names):
                fits = card is not None or file == wanted or without_precision(file) == base
                if fits and file in one.downloads:
                    order = (file != wanted, rank(precision_in_name(file), device_has_nvfp4()), number)
                    found.append((order, (folder, file, one.downloads[file])))
    return list(dict.fromkeys(entry for _, entry in sorted(found, key=lambda pair: pair[0])))


def _download(
    roots: ModelRoots, kinds: list[str], card: Architecture | None, name: str, endpoint: str | None, progress: Any
) -> Path:
    known = _downloads(kinds, card, name)
    if not known:
        raise Unresolved(name, "is not here, and no address of it is known; download it by hand into models/")
    folder, file, url = known[0]
    return fetch(url, roots.models_dir / folder / file, endpoint=endpoint, progress=progress)


def _nothing(roots: ModelRoots, kinds: list[str], card: Architecture | None, name: str) -> str:
    where = ", ".join(kinds[:4]) + (" and others" if len(kinds) > 4 else "")
    message = f"is not among the models in {roots.models_dir} ({where})"
    names = {file.name for kind in kinds for file in roots.files(kind)}
    wanted = _parts(name)[-1] if _parts(name) else name
    if broken := [path for path in roots.broken if path.name.lower() == wanted.lower()]:
        message += f"; {broken[0]} is a link to a file that is gone"
    if roots.unreadable:
        message += f"; {roots.unreadable[0]} can't be read (permissions?)"
    if close := difflib.get_close_matches(wanted, names, n=3, cutoff=0.5):
        message += f"; similar: {', '.join(close)}"
    if known := _downloads(kinds, card, name):
        message += f"; --download gets {known[0][1]} from {known[0][2]}"
    return message
