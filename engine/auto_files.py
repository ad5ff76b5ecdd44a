"""What "auto" means as a file in our loaders: the best one among the engine's models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoints.resolve import resolve_auto
from ..checkpoints.roots import Found, ModelRoots
from ..supported_models import AUTO, get_architecture
from .autoencoder import PIXEL_SPACE
from .model_folders import DEMO, ModelFolders

__all__ = ["auto_problem", "named"]


class EngineRoots(ModelRoots):
    """The engine's folders as the resolver sees them. The demo's files are nobody's choice."""

    def __init__(self, listed: ModelFolders):
        super().__init__(listed.roots[0] if listed.roots else Path("models"))
        self._listed = listed

    def files(self, kind: str) -> Iterator[Found]:
        for name, path in self._listed.files(kind).items():
            if DEMO not in path.parents:
                yield Found(kind, name, path)


def named(folders: ModelFolders, kind: str, file: str, architecture: str) -> str:
    """The file's name as the loader lists it; ``file`` itself unless it is "auto". Raises FileError, ValueError."""
    if file != AUTO:
        return file
    if kind == "vae" and architecture != AUTO and get_architecture(architecture).autoencoder == PIXEL_SPACE:
        return PIXEL_SPACE
    found = resolve_auto(EngineRoots(folders), kind, architecture).file
    return f"checkpoints/{found.name}" if found.kind == "checkpoints" else found.name


def auto_problem(folders: ModelFolders, kind: str, architecture: Any) -> tuple[str | None, str]:
    """(what is wrong or None, the name that "auto" stands for), for the check of a graph."""
    if not isinstance(architecture, str):
        return "is auto, which needs an architecture that is chosen on the node, not linked", AUTO
    try:
        return None, named(folders, kind, AUTO, architecture)
    except ValueError as error:
        return f"can't be found: {error}", AUTO
