"""convert: diffusers folders and files, prefixed and original layouts into ComfyUI's files, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..files.errors import FileError, OutputError
from ..quant.stream import Progress
from . import components, diffusion, text, vae, wan_vae
from .folders import ALL, LAYOUTS
from .kinds import AUTOENCODER, CHECKPOINT, DIFFUSION_MODEL, LORA, TEXT_ENCODER, kind_of, wrong_slot
from .opened import Checkpoint
from .pickles import open_any
from .report import ConversionReport
from .save import SHARD_BYTES, write_file, write_folder

_CONVERTIBLE = (DIFFUSION_MODEL, TEXT_ENCODER, AUTOENCODER)


def convert(
    # A file (safetensors, or a pickle: .pth, .pt, .bin, .ckpt), a shard index, or a folder.
    source: str | os.PathLike,
    # For "comfy" a .safetensors file (a folder for every part of a pipeline or of an all-in-one checkpoint), for
    # "diffusers" a new folder.
    destination: str | os.PathLike,
    *,
    layout: str = "comfy",
    component: str | None = None,  # of a whole pipeline (model_index.json); None = the transformer, "all" = every part
    architecture: str | None = None,  # a card's name; None = recognise
    tokenizer: str | os.PathLike | None = None,  # of a text encoder, when it isn't beside it
    progress: Progress | None = None,  # (done, total, key)
    shard_bytes: int = SHARD_BYTES,
) -> ConversionReport:
    """Write a model in another layout; quantized layers keep their bits.

    The source is a file, pickles among them, a shard index or a folder. The destination is a file for the layout of
    ComfyUI, a new folder for that of diffusers, and a folder too for every part of a pipeline. The component is the
    part of a pipeline that is meant, the transformer unless given. The architecture is recognised unless it is named;
    the tokenizer is that of a text encoder, where it does not lie beside it. Progress is called with what is done, what
    there is in all, and the key.
    Raises FileError, which names the keys that are missing or unknown, or the wrong kind of file; OutputError; and
    ValueError.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; known are {', '.join(LAYOUTS)}")
    if not os.fspath(source):
        # Path("") would be the folder that the command was called in.
        raise ValueError("no source was named")
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    parts, every = components.parts_of(path), component == ALL
    _check_component(path, component, parts, layout)
    if layout == "comfy" and parts and (every or (component is None and _is_folder(destination))):
        return components.to_folder(path, destination, parts, convert, progress=progress)
    component = None if every else component
    rest: list[str] = []
    if component is None and parts:
        component = components.main_part(parts)
        rest = [part for part in parts if part != component]
    with open_any(path, component=component or "transformer") as checkpoint:
        kind = kind_of(checkpoint.shapes)
        if kind is CHECKPOINT and layout == "comfy" and (every or _is_folder(destination)):
            return components.split(checkpoint, destination, progress=progress)
        if every:
            raise FileError(checkpoint.path, f"is {kind.title} alone; there are no parts to take apart")
        if kind is CHECKPOINT:
            raise FileError(
                checkpoint.path,
                "is an all-in-one checkpoint; give a folder as destination, or 'all' as component, to get one file per "
                "part in comfy layout first",
            )
        if kind is LORA:
            raise FileError(checkpoint.path, "is a LoRA or another adapter; `nativedit lora` converts those")
        if kind not in _CONVERTIBLE and architecture is None:
            # Says what it is, the closest architectures and the first keys.
            diffusion.recognise(checkpoint)
            raise FileError(checkpoint.path, wrong_slot(kind, DIFFUSION_MODEL))
        if layout == "comfy":
            report = _to_comfy(checkpoint, kind, destination, architecture, tokenizer, progress)
        else:
            report = _to_diffusers(checkpoint, kind, destination, architecture, progress, shard_bytes)
    if rest:
        report.notes.append(f"this is the pipeline's {component} alone; it also has {', '.join(rest)} (component)")
    return report


def _check_component(path: Path, component: str | None, parts: list[str], layout: str) -> None:
    if component == ALL and layout != "comfy":
        raise ValueError(f"component 'all' takes models apart for ComfyUI; layout {layout!r} is written part by part")
    if component in (None, ALL) or component in parts or (path / component).is_dir():
        return
    raise FileError(
        path, f"has no part {component!r}; " + (f"it has {', '.join(parts)}" if parts else "it is no pipeline")
    )


def _is_folder(destination: str | os.PathLike) -> bool:
    text = os.fspath(destination)
    return os.path.isdir(text) or text.endswith(("/", os.sep)) or not os.path.splitext(text)[1]


def _to_comfy(checkpoint: Checkpoint, kind, destination, architecture, tokenizer, progress) -> ConversionReport:
    if _is_folder(destination):
        raise OutputError(
            destination, "is a folder; a ComfyUI model is one file: give a name that ends in .safetensors"
        )
    if Path(destination).suffix.lower() != ".safetensors":
        raise OutputError(destination, "is not a .safetensors name, which ComfyUI wants")
    left_out, notes = [], []
    if kind is TEXT_ENCODER and architecture is None:
        title, move, metadata, left_out, notes = text.to_comfy(checkpoint, tokenizer)
    elif kind is AUTOENCODER and architecture is None:
        title, move, metadata = _autoencoder(checkpoint).to_comfy(checkpoint)
    else:
        match, move, metadata = diffusion.to_comfy(checkpoint, architecture)
        kind, title = DIFFUSION_MODEL, match.architecture.title
    write_file(destination, [("", move)], metadata, progress)
    count = len(move.targets) + len(move.constants)
    return ConversionReport(checkpoint.path, os.fspath(destination), kind.name, title, "comfy", count, left_out, notes)


def _autoencoder(checkpoint: Checkpoint) -> Any:
    return vae if wan_vae.find(checkpoint.shapes) is None else wan_vae


def _to_diffusers(checkpoint: Checkpoint, kind, destination, architecture, progress, shard_bytes) -> ConversionReport:
    if os.path.splitext(os.fspath(destination))[1] in (".safetensors", ".json"):
        raise OutputError(destination, "is a file name; a diffusers model is a folder")
    stem, files, notes = "diffusion_pytorch_model", {}, []
    if kind is TEXT_ENCODER and architecture is None:
        title, move, config, files, notes = text.to_diffusers(checkpoint)
        stem = "model"
    elif kind is AUTOENCODER and architecture is None:
        title, move, config, notes = _autoencoder(checkpoint).to_diffusers(checkpoint)
    else:
        match, move, config = diffusion.to_diffusers(checkpoint, architecture)
        kind, title = DIFFUSION_MODEL, match.architecture.title
    write_folder(destination, move, config, stem=stem, files=files, progress=progress, shard_bytes=shard_bytes)
    return ConversionReport(
        checkpoint.path, os.fspath(destination), kind.name, title, "diffusers", len(move.targets), [], notes
    )
