"""The public functions: where a card, a file and a module meet. Every name here is part of nativedit's contract."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import supported_models
from .checkpoints import autoencoder as _autoencoder
from .checkpoints import load as _load
from .checkpoints import resolve as _resolve
from .checkpoints.convert import convert
from .checkpoints.info import CheckpointInfo, inspect
from .checkpoints.load import LoadedTextEncoder
from .checkpoints.quantize import quantize
from .checkpoints.report import ConversionReport
from .quant.dequantize import dequantize
from .quant.repair import repair
from .quant.report import QuantizationReport
from .supported_models import Architecture

__all__ = [
    "Architecture",
    "CheckpointInfo",
    "ConversionReport",
    "LoadedTextEncoder",
    "QuantizationReport",
    "architectures",
    "convert",
    "dequantize",
    "inspect",
    "load_autoencoder",
    "load_diffusion_model",
    "load_text_encoder",
    "quantize",
    "repair",
    "resolve",
]


def architectures() -> list[Architecture]:
    """The cards of all architectures, by name."""
    return list(supported_models.architectures())


def load_diffusion_model(
    path: str | os.PathLike,
    *,
    architecture: str | None = None,  # a name from `architectures`; None = recognise by keys and shapes
    config: Mapping[str, Any] | None = None,  # constructor arguments that shapes can't tell
    dtype: str | torch.dtype | None = None,  # "bfloat16", "float32", ...; None = as stored
    device: str | torch.device = "cpu",
) -> torch.nn.Module:
    """The diffusion transformer in a comfy file, a shard index or a diffusers folder, in eval mode.

    The architecture is recognised by keys and shapes unless it is named; the config has constructor arguments that
    shapes do not tell; weights keep the dtype in which they are stored unless one is given.
    Raises FileError, which says what is wrong, in which layer, and what to do; FileNotFoundError; and ValueError for an
    unknown architecture.
    """
    return _load.load_diffusion_model(path, architecture=architecture, config=config, dtype=dtype, device=device)


def load_text_encoder(
    path: str | os.PathLike,
    *,
    family: str | None = None,  # "qwen3_vl", ...; None = recognise
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    tokenizer: str | os.PathLike | None = None,  # its folder or file; None = in the checkpoint or beside it
) -> LoadedTextEncoder:
    """A text encoder with its tokenizer, which is in the file, beside it, or where the argument says.

    The family is recognised unless it is named. Raises the same errors as the function for diffusion models.
    """
    return _load.load_text_encoder(path, family=family, config=config, dtype=dtype, device=device, tokenizer=tokenizer)


def load_autoencoder(
    path: str | os.PathLike,
    *,
    architecture: str | None = None,  # the diffusion model whose autoencoder is wanted; None = recognise
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> torch.nn.Module:
    """An autoencoder: it encodes pixels into the raw latent and decodes the latent into pixels, whole or in tiles.

    Pixels are a batch of pictures with channels first and values from minus one to one. The kind is recognised, or it
    is that of the diffusion model named as the architecture.
    Raises the same errors as the function for diffusion models.
    """
    # Pixels are [B, 3, H, W] in [-1, 1]; the methods are encode, decode, tiled_encode, tiled_decode.
    kind = None if architecture is None else supported_models.get_architecture(architecture).autoencoder
    return _autoencoder.load_autoencoder(path, autoencoder=kind, config=config, dtype=dtype, device=device)[0]


def resolve(
    name: str | os.PathLike,
    *,
    models_dir: str | os.PathLike,
    folder: str | None = None,  # ComfyUI's name of the kind; None = all
    override: str | os.PathLike | None = None,  # a path that wins
    extra_paths: str | os.PathLike | None = None,  # a YAML file; None = extra_model_paths.yaml beside models/
    download: bool = False,  # get it when it isn't there
) -> Path:
    """The file that a name means: a path, a file under ComfyUI's folder of models, or the best variant of a model or of
    an architecture: int8 with rotation before float8 before bfloat16.

    The folder is ComfyUI's name of a kind of model, all of them unless given; an override is a path that wins; extra
    paths are a file like the one that ComfyUI has for them, which is read anyway where it lies beside the models. A
    file that is not there is fetched when download is set.
    Raises FileError when there is none, or several, and says where it looked; FileNotFoundError when the folder does
    not exist.
    """
    return _resolve.resolve(
        name, models_dir=models_dir, folder=folder, override=override, extra_paths=extra_paths, download=download
    ).path
