"""What "auto" means as a file in our loaders: the best one among ComfyUI's models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import folder_paths

from ..checkpoints.resolve import resolve_auto
from ..checkpoints.roots import Found, ModelRoots
from ..supported_models import AUTO, get_architecture
from .hooks import PACK
from .vae import PIXEL_SPACE

DEMO = PACK / "demo"


class ComfyUIRoots(ModelRoots):
    """ComfyUI's folders, extra_model_paths.yaml and all, as the resolver sees them. The demo's files are nobody's
    choice."""

    def __init__(self) -> None:
        super().__init__(Path(folder_paths.models_dir))

    def files(self, kind: str) -> Iterator[Found]:
        for name in folder_paths.get_filename_list(kind):
            path = folder_paths.get_full_path(kind, name)
            if path is not None and DEMO not in Path(path).parents:
                yield Found(kind, Path(name).as_posix(), Path(path))


def auto_path(kind: str, architecture: str) -> str:
    """The best local file of a kind for an architecture. Raises FileError, ValueError."""
    return str(resolve_auto(ComfyUIRoots(), kind, architecture).path)


def wants_pixels(architecture: str) -> bool:
    """Whether the model works on pixels, without an autoencoder's file."""
    return architecture != AUTO and get_architecture(architecture).autoencoder == PIXEL_SPACE
