"""The pack's own models, listed by ComfyUI's loaders behind the user's."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from .hooks import PACK


def install(demo: Path = PACK / "demo") -> None:
    """Folders of ``demo`` named like ComfyUI's model folders. At the end: a user's file of the same name wins."""
    for folder in sorted(demo.glob("*/")):
        if folder.name in folder_paths.folder_names_and_paths:
            folder_paths.add_model_folder_path(folder.name, str(folder))
