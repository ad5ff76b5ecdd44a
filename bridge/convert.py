"""Converting models on disk inside ComfyUI: from its models folders into its output folder, nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths

from ..checkpoints.folders import ALL, MODEL_FOLDERS, model_folders, state_of
from ..host import AUTO, Saved
from .progress import node_progress
from .save import new_file


def list_model_folders() -> list[str]:
    """See ``host.Host``."""
    return list(_model_folders())


def _model_folders() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for kind in MODEL_FOLDERS:
        for root in folder_paths.folder_names_and_paths.get(kind, ((), ()))[0]:
            for name, path in model_folders(Path(root)):
                found.setdefault(f"{kind}/{name}", path)
    return found


def source_path(name: str) -> Path:
    """The file or folder of a name as the node lists it. Raises FileNotFoundError for every other one."""
    folder = _model_folders().get(name)
    if folder is not None:
        return folder
    kind, _, file = name.partition("/")
    known = kind in folder_paths.folder_names_and_paths and file in folder_paths.get_filename_list(kind)
    path = folder_paths.get_full_path(kind, file) if known else None
    if path is None:
        raise FileNotFoundError(f"{name!r} is no file or folder among ComfyUI's models; reload the page and choose one")
    return Path(path)


def fingerprint_source(name: str) -> str:
    try:
        return state_of(source_path(name))
    except FileNotFoundError:
        return "missing"


def convert_checkpoint(name: str, prefix: str, layout: str, component: str, architecture: str) -> Saved:
    """See ``host.Host``. Raises FileError, OutputError, UnsafePath, ValueError."""
    from ..checkpoints.convert import convert

    source = source_path(name)
    to_folder = layout == "diffusers" or component == ALL
    target, shown = new_file(prefix, "" if to_folder else ".safetensors")
    report = convert(
        source,
        target,
        layout=layout,
        component=None if component == AUTO else component,
        architecture=None if architecture == AUTO else architecture,
        progress=node_progress(),
    )
    if to_folder:
        first = min(Path(target).rglob("*.safetensors"))
        inside = os.path.relpath(first.parent, folder_paths.get_output_directory())
        shown = {"filename": first.name, "subfolder": Path(inside).as_posix(), "type": "output"}
    return Saved(target, "\n".join([str(report), *report.notes]), shown)
