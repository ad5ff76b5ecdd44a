"""The pack's own models, listed by ComfyUI's loaders behind the user's, and the folder of quantization policies."""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths

from ..host import POLICY_FOLDER
from .hooks import PACK


def install(demo: Path = PACK / "demo") -> None:
    """Folders of ``demo`` named like ComfyUI's model folders. At the end: a user's file of the same name wins."""
    policies = os.path.join(folder_paths.models_dir, POLICY_FOLDER)
    paths, _ = folder_paths.folder_names_and_paths.get(POLICY_FOLDER, ([policies], set()))
    folder_paths.folder_names_and_paths[POLICY_FOLDER] = (list(paths), {".toml"})
    for folder in sorted(demo.glob("*/")):
        if folder.name in folder_paths.folder_names_and_paths:
            folder_paths.add_model_folder_path(folder.name, str(folder))
