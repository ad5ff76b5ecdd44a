"""Text encoders from a diffusers folder into one file that carries its tokenizer, and back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from ..files.errors import FileError
from ..supported_models import Run, Target, import_dotted
from ..text_encoders.families import TextEncoder, find_text_encoder, module_keys
from ..text_encoders.tokenizer import CONFIG_TENSOR, JSON_TENSOR, SPIECE_TENSOR, Tokenizer, beside, tensor_bytes
from .diffusion import CONFIG_ENTRY, published_config
from .fill import check_keys
from .load import TOKENIZER_KEYS
from .moves import Move
from .opened import Checkpoint
from .stored_config import is_config

# Widths of the encoders that ComfyUI loads for its own models with a tokenizer of its own. Ours is not packed into
# those: a file with one is taken for an encoder of this pack's models.
_CORE_HAS_TOKENIZER = {"qwen3": (1024, 2048, 2560, 4096)}
# ComfyUI knows these without the prefix that it expects of language models.
_BARE = ("t5xxl",)
# The half of an encoder-decoder that no diffusion model asks.
_DECODER = r"^(?:model\.)?decoder\."
_TOKENIZER_FILES = {
    JSON_TENSOR: "tokenizer.json",
    SPIECE_TENSOR: "tokenizer.model",
    CONFIG_TENSOR: "tokenizer_config.json",
}


def to_comfy(
    checkpoint: Checkpoint, tokenizer: str | Path | None = None
) -> tuple[str, Move, dict[str, str], list[str], list[str]]:
    """(title, what to write, header entries, keys left out, notes). Raises FileError: missing or unknown keys."""
    found = find_text_encoder(checkpoint.shapes, checkpoint.metadata)
    notes: list[str] = []
    left_out = [key for key in checkpoint.shapes if re.match(_DECODER, key)] if _is_encoder_half(found) else []
    keys = [key for key in checkpoint.shapes if key not in set(left_out) and not _is_extra(key)]
    if found:
        _check(checkpoint, found[0], left_out)
    prefix = found[0][1] if found and found[0][0].name not in _BARE else None
    targets = [Target(_spelled(key, prefix), checkpoint.shapes[key], (Run(key),)) for key in keys]
    constants = {key: checkpoint.source.read(key) for key in checkpoint.source if _is_tokenizer(key)}
    if found and not constants and tokenizer is None and _is_cores(found[0]):
        notes.append("ComfyUI has this encoder's tokenizer itself; --tokenizer packs one")
    elif found and not constants:
        own = _tokenizer(checkpoint, tokenizer)
        if own is None:
            notes.append("no tokenizer beside it: the file holds the weights alone; --tokenizer names one")
        else:
            own.check_vocabulary(found[0][2]["vocab_size"], checkpoint.path)
            constants = own.state_tensors()
    metadata = {}
    if (config := published_config(checkpoint)) is not None:
        metadata[CONFIG_ENTRY] = json.dumps(config, sort_keys=True)
        if found and "model_type" in config:
            metadata["config"] = json.dumps({"text_encoder": config}, sort_keys=True)
    title = found[0][0].title if found else "a text encoder that only ComfyUI knows"
    return title, Move(checkpoint, targets, constants), metadata, left_out, notes


def to_diffusers(checkpoint: Checkpoint) -> tuple[str, Move, dict[str, Any] | None, dict[str, bytes], list[str]]:
    """(title, what to write, config.json, tokenizer files, notes)."""
    found = find_text_encoder(checkpoint.shapes, checkpoint.metadata)
    if found:
        _check(checkpoint, found[0], [])
    notes: list[str] = []
    targets = [Target(key, shape, (Run(key),)) for key, shape in checkpoint.shapes.items() if not _is_extra(key)]
    files = {
        _TOKENIZER_FILES[key.rpartition(".")[2]]: tensor_bytes(checkpoint.source.read(key))
        for key in checkpoint.source
        if _is_tokenizer(key)
    }
    config = published_config(checkpoint)
    if config is None:
        notes.append("the file does not carry the publisher's config.json, which transformers needs: add it")
    return found[0][0].title if found else "a text encoder", Move(checkpoint, targets), config, files, notes


def _is_encoder_half(found: list) -> bool:
    return bool(found) and found[0][0].name == "t5gemma"


def _is_cores(match: tuple[TextEncoder, str, dict[str, Any]]) -> bool:
    return match[2]["hidden_size"] in _CORE_HAS_TOKENIZER.get(match[0].name, ())


def _is_tokenizer(key: str) -> bool:
    return key.rpartition(".")[2] in TOKENIZER_KEYS


def _is_extra(key: str) -> bool:
    return _is_tokenizer(key) or is_config(key)


def _spelled(key: str, prefix: str | None) -> str:
    """ComfyUI knows language models by names that start with ``model.``; a bare folder has none."""
    return f"model.{key}" if prefix == "" else key


def _check(checkpoint: Checkpoint, match: tuple[TextEncoder, str, dict[str, Any]], left_out: list[str]) -> None:
    family, prefix, arguments = match
    module = import_dotted(family.module)(**arguments, device="meta", operations=torch.nn)
    expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    names = module_keys((key for key in checkpoint.shapes if key not in set(left_out)), prefix)
    inexact = {layer.keys["weight"] for layer in checkpoint.quantized.layers.values() if not layer.exact}
    padded = {name for key, name in names.items() if key in inexact}
    found = {name: checkpoint.shapes[key] for key, name in names.items() if name not in padded}
    check_keys(checkpoint.path, {k: v for k, v in expected.items() if k not in padded}, found)


def _tokenizer(checkpoint: Checkpoint, given: str | Path | None) -> Tokenizer | None:
    if given is not None:
        tokenizer = Tokenizer.from_path(given)
        if tokenizer is None:
            raise FileError(given, "holds no tokenizer.json, tokenizer.model or spiece.model")
        return tokenizer
    for place in beside(checkpoint.path):
        if place.exists() and (tokenizer := Tokenizer.from_path(place)) is not None:
            return tokenizer
    return None
