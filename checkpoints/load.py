"""From a file (or a diffusers folder) to a module in memory: recognise, build on meta, check every key, assign."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..files.dtypes import FLOAT_NAMES, parse_dtype
from ..files.errors import FileError
from ..files.source import Source
from ..quant.ops import QuantOps
from ..supported_models import Match, closest_architectures, find_architecture, import_dotted
from ..text_encoders.families import TextEncoder, find_text_encoder, module_keys
from ..text_encoders.tokenizer import Tokenizer
from .fill import fill, some
from .kinds import DIFFUSION_MODEL, TEXT_ENCODER, kind_of, wrong_slot
from .opened import Checkpoint, open_checkpoint
from .stored_config import is_config

# Tensors (uint8) that hold a tokenizer inside a checkpoint.
TOKENIZER_KEYS = ("tokenizer_json", "tokenizer_config", "spiece_model")


@dataclass
class LoadedTextEncoder:
    """A text encoder ready for prompts. ``model(ids, mask)`` -> states; see text_encoders.language_model."""

    path: str
    family: TextEncoder
    model: torch.nn.Module
    tokenizer: Tokenizer


def recognise(checkpoint: Checkpoint, *, architecture: str | None = None) -> Match:
    """The architecture of a diffusion model's file. Raises FileError that says what the file is instead."""
    shapes = checkpoint.shapes
    match = find_architecture(shapes, metadata=checkpoint.metadata, architecture=architecture)
    if match is not None:
        return match
    kind = kind_of(shapes)
    if kind is not DIFFUSION_MODEL and architecture is None:
        raise FileError(checkpoint.path, wrong_slot(kind, DIFFUSION_MODEL))
    close = closest_architectures(shapes)
    known = f"the closest known: {', '.join(close)}" if close else "nothing known is close to it"
    wanted = f"does not hold a {architecture} model" if architecture else "is a diffusion model of an unknown layout"
    raise FileError(checkpoint.path, f"{wanted}; {known}; its first keys: {some(shapes)}")


def load_diffusion_model(
    path: str | os.PathLike | Source,
    *,
    architecture: str | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    operations: Any = None,
    quantized_operations: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> torch.nn.Module:
    """The diffusion transformer of a file or diffusers folder, on ``device``, in eval mode.

    architecture: a card's name, None = recognise; config: constructor arguments that override card and header;
    dtype: of the weights, None = as stored (parameters the card keeps in float32 stay float32); operations: the layer
    namespace, None = torch.nn; quantized_operations: that of files with quantized layers, None = quant.ops.QuantOps;
    progress: called with (bytes done, bytes in all).
    Raises FileError: not such a file, a layer missing, left over or of the wrong shape.
    """
    with open_checkpoint(path, component="transformer") as checkpoint:
        match = recognise(checkpoint, architecture=architecture)
        cls = match.architecture.module_class()
        arguments = {**match.config, **_known_arguments(cls, checkpoint.source.config or {}), **(config or {})}
        names = {key: parts for key in checkpoint.shapes if not is_config(key) and (parts := match.parts(key))}
        module = _build(cls, arguments, checkpoint, names, dtype, operations, quantized_operations)
        keep = match.architecture.keep_float32
        fill(module, checkpoint, names, dtype=dtype, device=device, keep=keep, progress=progress)
    module.loaded_config = arguments
    module.dtype = parse_dtype(dtype) if dtype is not None else _common_dtype(module)
    return module


def load_text_encoder(
    path: str | os.PathLike,
    *,
    family: str | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    operations: Any = None,
    quantized_operations: Any = None,
    tokenizer: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedTextEncoder:
    """A text encoder and its tokenizer. family: "qwen3_vl", ...; None = recognise. See ``load_diffusion_model``.

    tokenizer: a tokenizer's folder or file when it is neither in the checkpoint nor beside it.
    """
    with open_checkpoint(path, component="text_encoder") as checkpoint:
        found = find_text_encoder(checkpoint.shapes, checkpoint.metadata)
        matches = [match for match in found if family in (None, match[0].name)]
        if not matches:
            kind = kind_of(checkpoint.shapes)
            problem = wrong_slot(kind, TEXT_ENCODER) if kind is not TEXT_ENCODER else _unknown_encoder(found, family)
            raise FileError(checkpoint.path, problem)
        encoder, prefix, arguments = matches[0]
        cls = import_dotted(encoder.module)
        names = module_keys(checkpoint.shapes, prefix)
        module = _build(
            cls, {**arguments, **(config or {})}, checkpoint, names, dtype, operations, quantized_operations
        )
        fill(module, checkpoint, names, dtype=dtype, device=device, progress=progress)
        own = _tokenizer(checkpoint.source, prefix, module, tokenizer)
        return LoadedTextEncoder(checkpoint.path, encoder, module, own)


def _tokenizer(source: Source, prefix: str, module: torch.nn.Module, given: str | os.PathLike | None) -> Tokenizer:
    """From ``given``, from the checkpoint's own tensors, or from files beside it."""
    if given is not None:
        tokenizer = Tokenizer.from_path(given)
        if tokenizer is None:
            raise FileError(os.fspath(given), "holds no tokenizer.json, tokenizer.model or spiece.model")
    else:
        tensors = {key: source.read(key) for key in source if key.rpartition(".")[2] in TOKENIZER_KEYS}
        # Beside the weights' prefix, or, as ComfyUI's own files have it, at the top.
        inside = Tokenizer.from_state_dict(tensors, source.path, prefix)
        tokenizer = inside or Tokenizer.find(tensors, source.path)
    tokenizer.check_vocabulary(module.config.vocab_size, source.path)
    return tokenizer


def _unknown_encoder(found: list, family: str | None) -> str:
    if family is None or not found:
        return "is a text encoder of a kind that NativeDiT does not know"
    return f"is a text encoder of kind {found[0][0].name}, not {family}"


def _known_arguments(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a published config.json are constructor arguments; the rest (class name, version) is not ours."""
    return {k: v for k, v in config.items() if k in inspect.signature(cls.__init__).parameters}


def _build(cls, arguments, checkpoint, names, dtype, operations, quantized_operations) -> torch.nn.Module:
    stored = [checkpoint.source.tensors[key].dtype for key in names]
    plain = [name for name in stored if name in FLOAT_NAMES] or ["BF16"]
    common = parse_dtype(dtype) if dtype is not None else parse_dtype(max(set(plain), key=plain.count))
    if checkpoint.quantized.is_quantized:
        operations = quantized_operations or QuantOps
    try:
        return cls(**arguments, device="meta", dtype=common, operations=operations or torch.nn)
    except (TypeError, ValueError) as error:
        raise FileError(checkpoint.path, f"its configuration does not fit {cls.__name__}: {error}") from error


def _common_dtype(module: torch.nn.Module) -> torch.dtype:
    """Of the weights that aren't quantized: the dtype that a host computes in if it follows the file."""
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.dtype in floats]
    return max(set(dtypes), key=dtypes.count) if dtypes else torch.float32
