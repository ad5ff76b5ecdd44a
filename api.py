"""The public functions: where a card, a file and a module meet. Every name here is part of nativedit's contract."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from . import supported_models
from .checkpoints import load as _load
from .checkpoints.info import CheckpointInfo, inspect
from .checkpoints.load import LoadedTextEncoder
from .checkpoints.quantize import quantize
from .quant.dequantize import dequantize
from .quant.repair import repair
from .quant.report import QuantizationReport
from .supported_models import Architecture

__all__ = [
    "Architecture",
    "CheckpointInfo",
    "LoadedTextEncoder",
    "QuantizationReport",
    "architectures",
    "dequantize",
    "inspect",
    "load_diffusion_model",
    "load_text_encoder",
    "quantize",
    "repair",
]


def architectures() -> list[Architecture]:
    """The cards of all architectures, by name."""
    return list(supported_models.architectures())


def load_diffusion_model(
    path: str | os.PathLike,
    *,
    architecture: str | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> torch.nn.Module:
    """The diffusion transformer in a comfy file, a shard index or a diffusers folder, in eval mode.

    architecture: a name from ``architectures()``, None = recognise by keys and shapes; config: constructor arguments
    that shapes can't tell; dtype: "bfloat16", "float32", ... or None = as stored.
    Raises FileError (what is wrong, in which layer, what to do), FileNotFoundError, ValueError (unknown architecture).
    """
    return _load.load_diffusion_model(path, architecture=architecture, config=config, dtype=dtype, device=device)


def load_text_encoder(
    path: str | os.PathLike,
    *,
    family: str | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    tokenizer: str | os.PathLike | None = None,
) -> LoadedTextEncoder:
    """A text encoder with its tokenizer. family: "qwen3_vl", ..., None = recognise; tokenizer: its folder or file,
    None = in the checkpoint or beside it. Raises as ``load_diffusion_model``."""
    return _load.load_text_encoder(path, family=family, config=config, dtype=dtype, device=device, tokenizer=tokenizer)
