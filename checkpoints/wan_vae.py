"""Both autoencoders of Wan: from the layout of Wan itself, which ComfyUI's files have, into that of diffusers and back.

Only names differ; no tensor changes its shape.
"""
# Wan 2.1's, which Qwen-Image has too, and Wan 2.2's.
# Sources of the names: ComfyUI 0.33.0 (modules of comfy/ldm/wan), diffusers 0.42.1 (AutoencoderKLWan,
# AutoencoderKLQwenImage).

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..files.errors import FileError
from ..supported_models import Run, Shapes, Target
from .diffusion import CONFIG_ENTRY, published_config
from .fill import check_keys, some
from .moves import Move
from .opened import Checkpoint

PREFIXES = ("", "vae.", "first_stage_model.", "autoencoder.")
_WANS, _THEIRS = "decoder.middle.0.residual.0.gamma", "decoder.mid_block.resnets.0.norm1.gamma"
# Both have four levels of two residual blocks, the decoder's with one more; time is halved at the second and third.
_LEVELS, _BLOCKS, _TIME = 4, 2, (False, True, True)

_ENDS = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(en|de)coder\.conv1\.", r"\1coder.conv_in."),
    (r"^(en|de)coder\.head\.0\.", r"\1coder.norm_out."),
    (r"^(en|de)coder\.head\.2\.", r"\1coder.conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
)
_INNER = (
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)


def find(shapes: Shapes) -> str | None:
    """The prefix of such an autoencoder's keys, None for another file."""
    return next((start for start in PREFIXES if start + _WANS in shapes or start + _THEIRS in shapes), None)


def to_comfy(checkpoint: Checkpoint) -> tuple[str, Move, dict[str, str]]:
    """(title, what to write, header entries). Raises FileError: missing, unknown or misshapen weights, by name."""
    title, targets = _targets(checkpoint, wans=True)
    config = published_config(checkpoint)
    metadata = {} if config is None else {CONFIG_ENTRY: json.dumps(config, sort_keys=True)}
    return title, Move(checkpoint, targets), metadata


def to_diffusers(checkpoint: Checkpoint) -> tuple[str, Move, dict[str, Any], list[str]]:
    """(title, what to write, config.json, notes). Raises FileError."""
    title, targets = _targets(checkpoint, wans=False)
    config = published_config(checkpoint)
    if config is not None:
        return title, Move(checkpoint, targets), config, []
    shapes = {target.name: target.shape for target in targets}
    channels = shapes["post_quant_conv.weight"][0]
    if channels != 16:
        raise FileError(
            checkpoint.path,
            f"is {title}, whose scale of the latents no weight tells; convert it from the publisher's folder, which "
            "has a config.json",
        )
    # The scale of 16 channels is what the class has without being told.
    config = {
        "_class_name": "AutoencoderKLWan",
        "base_dim": shapes["encoder.conv_in.weight"][0],
        "z_dim": channels,
    }
    notes = ["config.json names AutoencoderKLWan; Qwen-Image's pipeline calls the same weights AutoencoderKLQwenImage"]
    return title, Move(checkpoint, targets), config, notes


def _targets(checkpoint: Checkpoint, wans: bool) -> tuple[str, list[Target]]:
    prefix = find(checkpoint.shapes) or ""
    others = [key for key in checkpoint.shapes if not key.startswith(prefix)]
    if others:
        raise FileError(checkpoint.path, f"holds more than the autoencoder under {prefix!r}: {some(others)}")
    own = {key[len(prefix) :]: tuple(shape) for key, shape in checkpoint.shapes.items()}
    nested = any(".downsamples.0.downsamples." in key or ".down_blocks.0.resnets." in key for key in own)
    theirs = {key: _diffusers_name(key, nested) if _WANS in own else key for key in own}
    shapes = {theirs[key]: shape for key, shape in own.items()}
    expected = dict(_expected(nested, shapes))
    check_keys(checkpoint.path, {key: shapes.get(key, ()) for key in expected}, shapes)
    name_of = (lambda name: _wans_name(name, nested)) if wans else str
    targets = [Target(name_of(theirs[key]), shape, (Run(prefix + key),)) for key, shape in own.items()]
    return f"Wan {'2.2' if nested else '2.1'}'s autoencoder", targets


def _diffusers_name(key: str, nested: bool) -> str:
    for pattern, replacement in (*_ENDS, *_INNER):
        key = re.sub(pattern, replacement, key)
    if nested:
        last = {"down": _BLOCKS, "up": _BLOCKS + 1}
        found = re.match(r"(.*\.)(down|up)samples\.(\d+)\.\w+samples\.(\d+)\.(.*)", key)
        if found:
            start, way, level, number, rest = found.groups()
            inner = f"{way}sampler" if int(number) == last[way] else f"resnets.{number}"
            return f"{start}{way}_blocks.{level}.{inner}.{rest}"
        return key
    key = re.sub(r"\.downsamples\.(\d+)\.", r".down_blocks.\1.", key)
    found = re.match(r"decoder\.upsamples\.(\d+)\.(.*)", key)
    if found is None:
        return key
    level, number = divmod(int(found[1]), _BLOCKS + 2)
    inner = "upsamplers.0" if number == _BLOCKS + 1 else f"resnets.{number}"
    return f"decoder.up_blocks.{level}.{inner}.{found[2]}"


def _wans_name(name: str, nested: bool) -> str:
    last = {"down": _BLOCKS, "up": _BLOCKS + 1}
    found = re.match(r"(.*\.)(down|up)_blocks\.(\d+)\.(?:resnets\.(\d+)|(?:down|up)samplers?(?:\.0)?)\.(.*)", name)
    if found:
        start, way, level, number, rest = found.groups()
        place = last[way] if number is None else int(number)
        inner = f"{level}.{way}samples.{place}" if nested else str(int(level) * (last[way] + 1) + place)
        name = f"{start}{way}samples.{inner}.{rest}"
    name = re.sub(r"\.down_blocks\.(\d+)\.", r".downsamples.\1.", name)
    for old, new in (
        ("quant_conv.", "conv1."),
        ("post_quant_conv.", "conv2."),
        ("encoder.conv_in.", "encoder.conv1."),
        ("decoder.conv_in.", "decoder.conv1."),
    ):
        if name.startswith(old):
            return new + name[len(old) :]
    for old, new in (
        (r"\.norm_out\.", ".head.0."),
        (r"\.conv_out\.", ".head.2."),
        (r"\.mid_block\.resnets\.0\.", ".middle.0."),
        (r"\.mid_block\.attentions\.0\.", ".middle.1."),
        (r"\.mid_block\.resnets\.1\.", ".middle.2."),
        (r"\.norm1\.", ".residual.0."),
        (r"\.conv1\.", ".residual.2."),
        (r"\.norm2\.", ".residual.3."),
        (r"\.conv2\.", ".residual.6."),
        (r"\.conv_shortcut\.", ".shortcut."),
    ):
        name = re.sub(old, new, name)
    return name


def _expected(nested: bool, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, None]]:
    """Every key that the autoencoder has, in diffusers' names. A block has a shortcut where its width changes."""

    def weights(*layers: str) -> Iterator[tuple[str, None]]:
        for layer in layers:
            yield f"{layer}.weight", None
            yield f"{layer}.bias", None

    def block(start: str) -> Iterator[tuple[str, None]]:
        yield f"{start}.norm1.gamma", None
        yield f"{start}.norm2.gamma", None
        yield from weights(f"{start}.conv1", f"{start}.conv2")
        shape = shapes.get(f"{start}.conv1.weight", (0, 0))
        if shape[0] != shape[1]:
            yield from weights(f"{start}.conv_shortcut")

    def resample(start: str, time: bool) -> Iterator[tuple[str, None]]:
        yield from weights(f"{start}.resample.1", *([f"{start}.time_conv"] if time else []))

    yield from weights("quant_conv", "post_quant_conv")
    for half in ("encoder", "decoder"):
        yield from weights(f"{half}.conv_in", f"{half}.conv_out")
        yield f"{half}.norm_out.gamma", None
        yield from block(f"{half}.mid_block.resnets.0")
        yield from block(f"{half}.mid_block.resnets.1")
        yield f"{half}.mid_block.attentions.0.norm.gamma", None
        yield from weights(f"{half}.mid_block.attentions.0.to_qkv", f"{half}.mid_block.attentions.0.proj")
    for level in range(_LEVELS):
        down, up = f"encoder.down_blocks.{level}", f"decoder.up_blocks.{level}"
        flat = level * (_BLOCKS + 1)
        for number in range(_BLOCKS):
            yield from block(f"{down}.resnets.{number}" if nested else f"encoder.down_blocks.{flat + number}")
        for number in range(_BLOCKS + 1):
            yield from block(f"{up}.resnets.{number}")
        if level < _LEVELS - 1:
            lower = f"{down}.downsampler" if nested else f"encoder.down_blocks.{flat + _BLOCKS}"
            yield from resample(lower, _TIME[level])
            yield from resample(f"{up}.upsampler" if nested else f"{up}.upsamplers.0", _TIME[::-1][level])
