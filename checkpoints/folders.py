"""What can be converted, and into what: folders that hold a model (diffusers' pipelines, shards), names of layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .pickles import SUFFIXES

LAYOUTS = ("comfy", "diffusers")
# Said in place of a component: every part of a pipeline or of an all-in-one checkpoint.
ALL = "all"
# ComfyUI's folders under models/ in which people keep them.
MODEL_FOLDERS = ("diffusers", "diffusion_models", "text_encoders", "vae", "checkpoints")
# A pipeline's folder has model_index.json; a model's has config.json and weights, or an index of shards.
PIPELINE = "model_index.json"
_DEEPEST = 4


def model_folders(root: Path) -> Iterator[tuple[str, Path]]:
    """(name relative to ``root`` with ``/``, path), sorted. The parts of a pipeline are not listed beside it; a folder
    that two links reach is entered once."""
    seen: set[str] = set()
    for base, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(base)
        path = Path(base)
        depth = len(path.relative_to(root).parts)
        if real in seen or depth > _DEEPEST:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if depth and _is_model(files):
            folders.clear()
            yield path.relative_to(root).as_posix(), path


def _is_model(files: list[str]) -> bool:
    if PIPELINE in files or any(name.endswith(".index.json") for name in files):
        return True
    return "config.json" in files and any(name.endswith((".safetensors", *SUFFIXES)) for name in files)


def state_of(path: Path) -> str:
    """Changes when the file, or a file below the folder, does; never raises for one that is gone."""
    try:
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        states = [(os.fspath(file), file.stat()) for file in files]
    except OSError:
        return "missing"
    return " ".join(f"{name}:{state.st_size}:{state.st_mtime_ns}" for name, state in states)
