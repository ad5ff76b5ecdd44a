"""Autoencoders from diffusers' layout into the one that ComfyUI's own files have, and back.

Such an autoencoder may have three spellings: the original one, which ComfyUI's files keep, the one of diffusers, and an
early one of diffusers with other names for the attention. Kinds that are named alike everywhere are copied.
"""
# The original is CompVis', the early one that of 2022. Source of the names: autoencoders/kl_kinds.py.

from __future__ import annotations

import json
import re
from typing import Any

import torch

from ..autoencoders import find_autoencoder, fitted
from ..autoencoders.kl_kinds import ORIGINAL, old_layout, original_layout
from ..files.errors import FileError
from ..supported_models import Run, Target, import_dotted
from .diffusion import CONFIG_ENTRY, published_config
from .fill import check_keys, some
from .kinds import AUTOENCODER, kind_of, wrong_slot
from .moves import Move
from .opened import Checkpoint

PREFIXES = ("", "vae.", "first_stage_model.", "autoencoder.")
_DIFFUSERS_MARK = "encoder.down_blocks.0.resnets.0.conv1.weight"
_INVERSE = (
    (r"\.down_blocks\.(\d+)\.resnets\.(\d+)\.", r".down.\1.block.\2."),
    (r"\.down_blocks\.(\d+)\.downsamplers\.0\.", r".down.\1.downsample."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
    (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out."),
    (r"coder\.conv_norm_out\.", "coder.norm_out."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
)
_MODULES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "bn.")
_UP = r"^decoder\.up_blocks\.(\d+)\.(?:resnets\.(\d+)|upsamplers\.0)\."
_ATTENTION = r"\.attn_1\.(?:q|k|v|proj_out)\.weight$|\.attentions\.0\.to_(?:q|k|v|out\.0)\.weight$"


def has_diffusers_names(checkpoint: Checkpoint) -> bool:
    """Whether it is a KL autoencoder under names that ComfyUI's own files don't have."""
    return any(prefix + _DIFFUSERS_MARK in checkpoint.shapes for prefix in PREFIXES)


def to_comfy(checkpoint: Checkpoint) -> tuple[str, Move, dict[str, str]]:
    """(title, what to write, header entries). Raises FileError."""
    title, targets, _ = _targets(checkpoint, original=True)
    config = published_config(checkpoint)
    return (
        title,
        Move(checkpoint, targets),
        {} if config is None else {CONFIG_ENTRY: json.dumps(config, sort_keys=True)},
    )


def to_diffusers(checkpoint: Checkpoint) -> tuple[str, Move, dict[str, Any], list[str]]:
    """(title, what to write, config.json, notes). Raises FileError."""
    title, targets, found = _targets(checkpoint, original=False)
    config = published_config(checkpoint)
    if config is not None:
        return title, Move(checkpoint, targets), config, []
    if found is None:
        raise FileError(
            checkpoint.path,
            "is an autoencoder whose scale of the latents no weight tells and this pack does not know; convert it from "
            "the publisher's folder, which has a config.json",
        )
    name = found.autoencoder.module.rpartition(":")[2]
    return title, Move(checkpoint, targets), {"_class_name": name, **_plain(found.config)}, []


def _targets(checkpoint: Checkpoint, original: bool):
    prefix = _prefix(checkpoint)
    own = {key[len(prefix) :]: shape for key, shape in checkpoint.shapes.items() if key.startswith(prefix)}
    others = [key for key in checkpoint.shapes if not key.startswith(prefix)]
    if others:
        raise FileError(checkpoint.path, f"holds more than the autoencoder under {prefix!r}: {some(others)}")
    found = find_autoencoder(checkpoint.shapes)
    if _DIFFUSERS_MARK not in own and ORIGINAL.marker not in own:
        return _named_alike(checkpoint, own, prefix, found)
    rename = (original_layout if ORIGINAL.marker in own else old_layout)(own)
    names = {key: rename(key) for key in own}
    if found is not None:
        _check(checkpoint, found, {names[key]: shape for key, shape in own.items()})
    levels = 1 + max((int(match[1]) for name in names.values() if (match := re.match(_UP, name))), default=0)
    targets = []
    for key, shape in own.items():
        name = _original(names[key], levels) if original else names[key]
        targets.append(Target(name, _fitting(name, shape, original), (Run(prefix + key),)))
    strange = [target.name for target in targets if not target.name.startswith(_MODULES)]
    if strange:
        raise FileError(checkpoint.path, f"{len(strange)} keys are none of a KL autoencoder: {some(strange)}")
    return found.autoencoder.title if found else "a KL autoencoder", targets, found


def _named_alike(checkpoint: Checkpoint, own: dict, prefix: str, found: Any):
    if found is None:
        kind = kind_of(checkpoint.shapes)
        known = "is an autoencoder whose other layout this pack does not know"
        raise FileError(checkpoint.path, known if kind is AUTOENCODER else wrong_slot(kind, AUTOENCODER))
    parts: dict[str, tuple[tuple[int, ...], Run]] = {}
    for key, shape in own.items():
        names = found.names(prefix + key)
        if len(names) == 1:
            parts[names[0]] = shape, Run(prefix + key)
            continue
        rows = shape[0] // len(names)
        for i, name in enumerate(names):
            parts[name] = (rows, *shape[1:]), Run(prefix + key, i * rows, (i + 1) * rows)
    expected = _check(checkpoint, found, {name: shape for name, (shape, _) in parts.items()})
    targets = [Target(name, fitted(shape, expected[name]), (run,)) for name, (shape, run) in parts.items()]
    return found.autoencoder.title, targets, found


def _prefix(checkpoint: Checkpoint) -> str:
    marks = (
        "encoder.conv_in.weight",
        "encoder.conv_out.weight",
        "encoder.conv1.weight",
        "encoder.project_in.conv.weight",
    )
    return next((start for start in PREFIXES if any(start + mark in checkpoint.shapes for mark in marks)), "")


def _check(checkpoint: Checkpoint, found: Any, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the kind's module. Raises FileError where these are others."""
    module = import_dotted(found.autoencoder.module)(**found.config, device="meta", operations=torch.nn)
    expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    have = {key: fitted(shape, expected[key]) if key in expected else shape for key, shape in shapes.items()}
    check_keys(checkpoint.path, expected, have)
    return expected


def _original(name: str, levels: int) -> str:
    """From diffusers' name to the original: the decoder's levels count from the other end."""
    match = re.match(_UP, name)
    if match:
        inner = "upsample" if match[2] is None else f"block.{match[2]}"
        name = f"decoder.up.{levels - 1 - int(match[1])}.{inner}.{name[match.end() :]}"
    for pattern, replacement in _INVERSE:
        name = re.sub(pattern, replacement, name)
    return name


def _fitting(name: str, shape: tuple[int, ...], original: bool) -> tuple[int, ...]:
    """The attention's matrices: 1x1 convolutions in the original layout, linear layers in diffusers'."""
    if not re.search(_ATTENTION, name):
        return tuple(shape)
    return (*shape[:2], 1, 1) if original else tuple(shape[:2])


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
