"""Models of several parts: a diffusers pipeline, an all-in-one checkpoint; taken apart and put together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from ..files.atomic import new_folder
from ..files.errors import FileError
from ..files.header import parse_json_object
from ..quant.stream import Progress
from ..supported_models import Run, Target, find_architecture
from . import vae
from .kinds import AUTOENCODER, DIFFUSION_MODEL, TEXT_ENCODER
from .moves import Move
from .opened import Checkpoint
from .pickles import open_any
from .report import ConversionReport
from .save import write_file

# Prefix in an all-in-one checkpoint -> folder under models/. A text encoder's name follows its prefix.
_PARTS = {
    "model.diffusion_model.": DIFFUSION_MODEL,
    "first_stage_model.": AUTOENCODER,
    "vae.": AUTOENCODER,
    "text_encoders.": TEXT_ENCODER,
    "cond_stage_model.": TEXT_ENCODER,
}
# Component of a pipeline -> folder under models/.
_FOLDERS = {
    "transformer": "diffusion_models",
    "dit_model": "diffusion_models",  # F-Lite's name for it
    "text_encoder": "text_encoders",
    "vae": "vae",
}
# Wan 2.2's pipeline has two transformers; ComfyUI's files are told apart by these words.
_NOISE = {"transformer": "high_noise", "transformer_2": "low_noise"}


def parts_of(folder: Path) -> list[str]:
    """The components of a diffusers pipeline's folder that hold weights; [] for anything else."""
    return [name for name in _named(folder) if _has_weights(folder / name)]


def absent_parts(folder: Path) -> list[str]:
    """Components that the pipeline's index names and whose weights are not in the folder."""
    return [name for name in _named(folder) if not _has_weights(folder / name)]


def _named(folder: Path) -> list[str]:
    index = folder / "model_index.json"
    if not folder.is_dir() or not index.is_file():
        return []
    named = parse_json_object(index, index.read_bytes(), index.name)
    # A component that a pipeline does without is [null, null] there.
    return [
        name
        for name, where in named.items()
        if name.startswith(tuple(_FOLDERS)) and isinstance(where, list) and where and where[0] is not None
    ]


def main_part(parts: list[str]) -> str:
    """The one that is meant when none is named: the diffusion model, if there is one."""
    return next((part for part in parts if _FOLDERS.get(part) == "diffusion_models"), parts[0])


def _has_weights(folder: Path) -> bool:
    return folder.is_dir() and any(file.suffix in (".safetensors", ".bin", ".pth", ".pt") for file in folder.iterdir())


def to_folder(
    source: Path,
    destination: str | os.PathLike,
    parts: list[str],
    convert: Callable[..., ConversionReport],
    *,
    progress: Progress | None = None,
) -> ConversionReport:
    """Every part of a pipeline below the destination, in folders that have the names of ComfyUI's own.

    A pair of transformers, one for high noise and one for low, keeps ComfyUI's names for that too.
    """
    # diffusion_models/, text_encoders/, vae/; NAME_high_noise, NAME_low_noise.
    stem, notes, count = source.resolve().name, [], 0
    with new_folder(destination) as target:
        for part in parts:
            kind = part.removesuffix("_2").removesuffix("_3")
            ending = f"_{_NOISE[part]}" if "transformer_2" in parts and part in _NOISE else part.removeprefix(kind)
            file = target / _FOLDERS[kind] / f"{stem}{ending}.safetensors"
            file.parent.mkdir(exist_ok=True)
            report = convert(source / part, file, layout="comfy", progress=progress)
            count += report.tensors
            notes += [f"{file.parent.name}/{file.name}: {report.architecture}", *report.notes]
    notes += [f"{part}: named in model_index.json, but its weights are not there" for part in absent_parts(source)]
    return ConversionReport(
        os.fspath(source), os.fspath(destination), "checkpoint", "a pipeline", "comfy", count, [], notes
    )


def split(
    checkpoint: Checkpoint, destination: str | os.PathLike, *, progress: Progress | None = None
) -> ConversionReport:
    """One file per part of an all-in-one checkpoint, in ComfyUI's folders. Raises FileError: a key of no part."""
    found = _parts(checkpoint)
    stem, notes, count = Path(checkpoint.path).stem, [], 0
    with new_folder(destination) as target:
        for prefix, keys in found.items():
            kind = next(kind for start, kind in _PARTS.items() if prefix.startswith(start))
            name = prefix.removeprefix("text_encoders.").rstrip(".")
            ending = f"_{name}" if kind is TEXT_ENCODER else ""
            file = target / kind.folder / f"{stem}{ending}.safetensors"
            file.parent.mkdir(exist_ok=True)
            targets = [Target(key[len(prefix) :], checkpoint.shapes[key], (Run(key),)) for key in keys]
            write_file(file, [("", Move(checkpoint, targets))], {}, progress)
            count += len(keys)
            notes.append(f"{kind.folder}/{file.name}: {len(keys)} tensors from {prefix}")
    return ConversionReport(
        checkpoint.path, os.fspath(destination), "checkpoint", "an all-in-one checkpoint", "comfy", count, [], notes
    )


def _parts(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Prefix -> keys; a text encoder's prefix includes its name. Raises FileError for keys of no part."""
    found: dict[str, list[str]] = {}
    strange = []
    for key in checkpoint.shapes:
        start = next((prefix for prefix in _PARTS if key.startswith(prefix)), None)
        if start is None:
            strange.append(key)
            continue
        if start == "text_encoders.":
            start += key[len(start) :].partition(".")[0] + "."
        found.setdefault(start, []).append(key)
    if strange:
        raise FileError(
            checkpoint.path, f"{len(strange)} keys belong to no part that is known: {', '.join(strange[:5])}"
        )
    return found


def _refuse_other_names(checkpoint: Checkpoint) -> None:
    """Raises FileError for what ComfyUI would not find under an all-in-one checkpoint's prefix."""
    problem = None
    match = find_architecture(checkpoint.shapes, metadata=checkpoint.metadata)
    if match is not None and match.architecture.two_way is not None and match.layout is match.architecture.two_way:
        problem = "has diffusers' names"
    elif match is not None and match.prefix:
        problem = f"has the prefix {match.prefix!r} already"
    elif vae.has_diffusers_names(checkpoint):
        problem = "has diffusers' names"
    if problem is not None:
        way_out = "make ComfyUI's file of it first (nativedit convert)"
        raise FileError(checkpoint.path, f"{problem}; {way_out}")


def join(
    parts: Mapping[str, str | os.PathLike], destination: str | os.PathLike, *, progress: Progress | None = None
) -> ConversionReport:
    """An all-in-one checkpoint of several files, each under its prefix there.

    Raises FileError for a file whose names are not ComfyUI's, ValueError for a prefix that ComfyUI does not know.
    """
    # Prefixes: "model.diffusion_model.", "text_encoders.t5xxl.", "vae.".
    for prefix in parts:
        if not prefix.endswith(".") or not any(prefix.startswith(start) for start in _PARTS):
            raise ValueError(f"prefix {prefix!r} is not one of {', '.join(_PARTS)} (a text encoder's name follows it)")
    with ExitStack() as stack:
        moves = []
        for prefix, path in parts.items():
            checkpoint = stack.enter_context(open_any(path))
            _refuse_other_names(checkpoint)
            targets = [Target(key, shape, (Run(key),)) for key, shape in checkpoint.shapes.items()]
            moves.append((prefix, Move(checkpoint, targets)))
        write_file(destination, moves, {}, progress)
        count = sum(len(move.targets) for _, move in moves)
    names = ", ".join(os.fspath(path) for path in parts.values())
    return ConversionReport(
        names, os.fspath(destination), "checkpoint", "an all-in-one checkpoint", "comfy", count, [], []
    )
