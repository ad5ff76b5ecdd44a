"""Saving models of the graph: one safetensors file each, written in pieces, in the output folder and nowhere else."""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import comfy.cli_args
import folder_paths
import torch

from ..checkpoints import transform
from ..files.errors import OutputError, UnsafePath
from ..files.memory import Lazy, TensorSource
from ..files.paths import contained, safe_parts
from ..host import AS_STORED, Graph, Saved
from ..quant.craft import PLAIN, Craft
from ..quant.formats import Recipe
from ..quant.markers import HEADER_KEY, RECORD_KEY
from ..supported_models import find_architecture
from .clip import TextEncoderModel
from .progress import node_progress
from .quantize import DetectedAs, compute_device, policy_of
from .weights import Baking, diffusion_weights, header_of, not_in_weights, patched_entries

log = logging.getLogger(__name__)

SPEC = "modelspec."
_TEMPLATES = "%(?:width|height|year|month|day|hour|minute|second)%"
# Header entries that are about the file they were found in.
_NOT_KEPT = {HEADER_KEY, RECORD_KEY, "prompt", "workflow", SPEC + "hash_sha256", SPEC + "date", SPEC + "title"}


def new_file(prefix: str, suffix: str = ".safetensors") -> tuple[str, dict[str, str]]:
    """(path, how ComfyUI names it) of the next free file (a folder, without ``suffix``) of a name template. Raises
    UnsafePath."""
    root = folder_paths.get_output_directory()
    if "%date:" in prefix:
        raise UnsafePath(
            prefix,
            "%date:...% is filled in for ComfyUI's own save nodes alone; write %year%-%month%-%day% in its place",
        )
    safe_parts(re.sub(_TEMPLATES, "0", prefix), root)  # before ComfyUI makes folders of it
    try:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, root)
    except OSError as error:
        raise OutputError(os.path.join(root, prefix), f"its folder can't be made ({error.strerror})") from None
    file = f"{name}_{counter:05}_{suffix}"
    contained(root, os.path.join(subfolder, file))
    return os.path.join(folder, file), {"filename": file, "subfolder": subfolder, "type": "output"}


def save_diffusion_model(
    patcher: Any, prefix: str, precision: str, policy: str, graph: Graph, craft: Craft = PLAIN
) -> Saved:
    """A model with its patches baked, in the layout of ComfyUI: quantized layers keep their bits, or every layer gets
    the precision that is asked for.

    Raises FileError, QuantError, OutputError, UnsafePath and ValueError.
    """
    path, shown = new_file(prefix)
    if lost := not_in_weights(patcher):
        log.warning("NativeDiT: the saved model is without its %s: they are no weights", " and ".join(lost))
    with patcher.use_ejected():
        weights = diffusion_weights(patcher)
        plan = transform.plan(
            weights.source,
            None if precision == AS_STORED else precision,
            policy=policy_of(policy),
            requantize=weights.requantize,
            device=compute_device(),
            detect=DetectedAs(),
            craft=craft,
        )
        match = find_architecture(weights.source.shapes())
        architecture = match.architecture.name if match else type(patcher.model).__name__
        plan.write(path, metadata(weights.source.metadata, path, architecture, graph), node_progress())
    lines = (_summary(path, plan), *plan.report.warnings, _reported(weights.baking))
    return Saved(path, "\n".join(filter(None, lines)), shown)


def save_text_encoder(clip: Any, prefix: str, precision: str, policy: str, graph: Graph) -> list[Saved]:
    """A CLIP with its patches baked and its tokenizer, one file per encoder inside it."""
    baking = Baking()
    entries, requantize = patched_entries(clip.patcher, baking=baking)
    tokenizer = dict(clip.tokenizer.state_dict())
    saved = []
    parts = _encoders(clip, entries)
    largest = max(parts, key=lambda name: len(parts[name]))
    for name, renamed in parts.items():
        path, shown = new_file(prefix if len(parts) == 1 else f"{prefix}_{name}")
        tensors = {new: entries[old] for old, new in renamed.items()}
        if name == largest:
            tensors |= {key: value for key, value in tokenizer.items() if isinstance(value, torch.Tensor)}
        recipes = _renamed_layers(requantize, renamed)
        source = TensorSource(f"the text encoder {name} in the graph", tensors, header_of(clip.patcher))
        plan = transform.plan(
            source,
            None if precision == AS_STORED else precision,
            policy=policy_of(policy),
            requantize=recipes,
            device=compute_device(),
        )
        kept = source.metadata if len(parts) == 1 else {}
        plan.write(path, metadata(kept, path, name, graph), node_progress())
        saved.append(Saved(path, _summary(path, plan), shown))
    misfits = _reported(baking)
    return [replace(one, text=f"{one.text}\n{misfits}") for one in saved] if misfits else saved


def save_vae(vae: Any, prefix: str, precision: str, graph: Graph) -> Saved:
    """A VAE's weights as ComfyUI loads them."""
    path, shown = new_file(prefix)
    source = TensorSource("the VAE in the graph", vae.get_sd(), header_of(vae.patcher))
    plan = transform.plan(source, None if precision == AS_STORED else precision)
    name = type(vae.first_stage_model).__name__
    plan.write(path, metadata(source.metadata, path, name, graph), node_progress())
    return Saved(path, _summary(path, plan), shown)


def metadata(kept: Mapping[str, str], path: str, architecture: str, graph: Graph) -> dict[str, str]:
    """The header: what the loaded file's said, what this file is, and (unless ComfyUI is told not to) the workflow."""
    result = {key: value for key, value in kept.items() if key not in _NOT_KEPT}
    result["format"] = "pt"
    result[SPEC + "sai_model_spec"] = "1.0.1"
    result.setdefault(SPEC + "architecture", architecture)
    result[SPEC + "title"] = os.path.splitext(os.path.basename(path))[0]
    result[SPEC + "date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if not comfy.cli_args.args.disable_metadata:
        if graph.prompt is not None:
            result["prompt"] = json.dumps(graph.prompt)
        for key, value in (graph.extra or {}).items():
            result[key] = json.dumps(value)
    return result


def _encoders(clip: Any, entries: Mapping[str, torch.Tensor | Lazy]) -> dict[str, dict[str, str]]:
    """Encoder -> {its key in the CLIP: its key in a file of its own}."""
    if isinstance(clip.cond_stage_model, TextEncoderModel):
        start = clip.cond_stage_model.prefix
        return {clip.cond_stage_model.family.name: {key: key.removeprefix(start) for key in entries}}
    parts: dict[str, dict[str, str]] = {}
    for key in entries:
        name, _, rest = key.partition(".")
        parts.setdefault(name, {})[key] = rest.removeprefix("transformer.")
    return parts


def _renamed_layers(recipes: Mapping[str, Recipe], renamed: Mapping[str, str]) -> dict[str, Recipe]:
    return {
        renamed[f"{layer}.weight"].removesuffix(".weight"): recipe
        for layer, recipe in recipes.items()
        if f"{layer}.weight" in renamed
    }


def _reported(baking: Baking) -> str:
    if misfits := baking.summary():
        log.warning("NativeDiT: saved with what fits: %s", misfits)
    return misfits


def _summary(path: str, plan: transform.Plan) -> str:
    size = os.path.getsize(path)
    name = os.path.relpath(path, folder_paths.get_output_directory())
    quantized = f", {len(plan.report.quantized)} layers newly quantized" if plan.report.quantized else ""
    return f"{name}: {len(plan.assembly.entries)} tensors, {size / 1e9:.3f} GB{quantized}"
