"""From a file (or a diffusers folder) to a module in memory: recognise, build on meta, check every key, assign."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..files.dtypes import parse_dtype
from ..files.errors import FileError
from ..files.source import Source, open_source
from ..supported_models import Match, Part, closest_architectures, find_architecture, import_dotted
from ..text_encoders.families import TextEncoder, find_text_encoder, module_keys
from ..text_encoders.tokenizer import Tokenizer
from .kinds import DIFFUSION_MODEL, TEXT_ENCODER, kind_of, wrong_slot
from .stored_config import is_config, metadata_of

# Tensors (uint8) that hold a tokenizer inside a checkpoint.
TOKENIZER_KEYS = ("tokenizer_json", "tokenizer_config", "spiece_model")
# The keys named in an error message; the rest is counted.
SHOWN = 5


@dataclass
class LoadedTextEncoder:
    """A text encoder ready for prompts. ``model(ids, mask)`` -> states; see text_encoders.language_model."""

    path: str
    family: TextEncoder
    model: torch.nn.Module
    tokenizer: Tokenizer


def recognise(source: Source, *, architecture: str | None = None) -> Match:
    """The architecture of a diffusion model's file. Raises FileError that says what the file is instead."""
    match = find_architecture(source.shapes(), metadata=metadata_of(source), architecture=architecture)
    if match is not None:
        return match
    kind = kind_of(source.shapes())
    if kind is not DIFFUSION_MODEL and architecture is None:
        raise FileError(source.path, wrong_slot(kind, DIFFUSION_MODEL))
    close = closest_architectures(source.shapes())
    known = f"the closest known: {', '.join(close)}" if close else "nothing known is close to it"
    wanted = f"does not hold a {architecture} model" if architecture else "is a diffusion model of an unknown layout"
    raise FileError(source.path, f"{wanted}; {known}; its first keys: {_some(source)}")


def load_diffusion_model(
    path: str | os.PathLike,
    *,
    architecture: str | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    operations: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> torch.nn.Module:
    """The diffusion transformer of a file or diffusers folder, on ``device``, in eval mode.

    architecture: a card's name, None = recognise; config: constructor arguments that override card and header;
    dtype: of the weights, None = as stored (parameters the card keeps in float32 stay float32); operations: the layer
    namespace, None = torch.nn; progress: called with (bytes done, bytes in all).
    Raises FileError: not such a file, a layer missing, left over or of the wrong shape.
    """
    with open_source(path, component="transformer") as source:
        match = recognise(source, architecture=architecture)
        cls = match.architecture.module_class()
        arguments = {**match.config, **_known_arguments(cls, source.config or {}), **(config or {})}
        names = {key: parts for key in source if not is_config(key) and (parts := match.parts(key))}
        module = _build(cls, arguments, source, names, dtype, operations)
        fill(module, source, names, dtype=dtype, device=device, keep=match.architecture.keep_float32, progress=progress)
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
    tokenizer: str | os.PathLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedTextEncoder:
    """A text encoder and its tokenizer. family: "qwen3_vl", ...; None = recognise. See ``load_diffusion_model``.

    tokenizer: a tokenizer's folder or file when it is neither in the checkpoint nor beside it.
    """
    with open_source(path, component="text_encoder") as source:
        found = find_text_encoder(source.shapes(), metadata_of(source))
        matches = [match for match in found if family in (None, match[0].name)]
        if not matches:
            kind = kind_of(source.shapes())
            problem = wrong_slot(kind, TEXT_ENCODER) if kind is not TEXT_ENCODER else _unknown_encoder(found, family)
            raise FileError(source.path, problem)
        encoder, prefix, arguments = matches[0]
        cls = import_dotted(encoder.module)
        names = module_keys(source, prefix)
        module = _build(cls, {**arguments, **(config or {})}, source, names, dtype, operations)
        fill(module, source, names, dtype=dtype, device=device, progress=progress)
        return LoadedTextEncoder(source.path, encoder, module, _tokenizer(source, prefix, module, tokenizer))


def _tokenizer(source: Source, prefix: str, module: torch.nn.Module, given: str | os.PathLike | None) -> Tokenizer:
    """From ``given``, from the checkpoint's own tensors, or from files beside it."""
    if given is not None:
        tokenizer = Tokenizer.from_path(given)
        if tokenizer is None:
            raise FileError(os.fspath(given), "holds no tokenizer.json, tokenizer.model or spiece.model")
    else:
        tensors = {key: source.read(key) for key in source if key.rpartition(".")[2] in TOKENIZER_KEYS}
        tokenizer = Tokenizer.find(tensors, source.path, prefix)
    tokenizer.check_vocabulary(module.config.vocab_size, source.path)
    return tokenizer


def _unknown_encoder(found: list, family: str | None) -> str:
    if family is None or not found:
        return "is a text encoder of a kind that NativeDiT does not know"
    return f"is a text encoder of kind {found[0][0].name}, not {family}"


def _known_arguments(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a published config.json are constructor arguments; the rest (class name, version) is not ours."""
    return {k: v for k, v in config.items() if k in inspect.signature(cls.__init__).parameters}


def _build(cls, arguments, source, names, dtype, operations) -> torch.nn.Module:
    stored = [source.tensors[key].dtype for key in names]
    common = parse_dtype(dtype) if dtype is not None else parse_dtype(max(set(stored), key=stored.count))
    try:
        return cls(**arguments, device="meta", dtype=common, operations=operations or torch.nn)
    except (TypeError, ValueError) as error:
        raise FileError(source.path, f"its configuration does not fit {cls.__name__}: {error}") from error


def fill(
    module: torch.nn.Module,
    source: Source,
    names: Mapping[str, str | tuple[Part, ...]],
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    keep: Iterable[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Load ``names`` (key in the file -> key in the module, or the parts of it that are ours) into a module built on
    meta; nothing may be missing."""
    places = {key: (Part(name),) if isinstance(name, str) else name for key, name in names.items()}
    expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    found = {part.name: part.shape(source.tensors[key].shape) for key, parts in places.items() for part in parts}
    check_keys(source.path, expected, found)
    target = None if dtype is None else parse_dtype(dtype)
    total, done, state = sum(source.tensors[key].nbytes for key in names), 0, {}
    for key, parts in places.items():
        whole = source.read(key)
        for part in parts:
            tensor = part.take(whole)
            if target is not None and tensor.is_floating_point():
                kept = any(re.search(pattern, part.name) for pattern in keep)
                tensor = tensor.to(torch.float32 if kept else target)
            state[part.name] = tensor.to(device)
        done += source.tensors[key].nbytes
        if progress is not None:
            progress(done, total)
    module.load_state_dict(state, strict=True, assign=True)
    module.requires_grad_(False).eval()


def check_keys(path: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """One error that names the layers: missing, left over, or of another shape. Raises FileError."""
    missing = [key for key in expected if key not in found]
    unexpected = [key for key in found if key not in expected]
    wrong = [f"{k} is {list(found[k])}, expected {list(expected[k])}" for k in expected if k in found and
             tuple(found[k]) != tuple(expected[k])]  # fmt: skip
    problems = []
    if missing:
        problems.append(f"{len(missing)} weights are missing: {_some(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} are unknown to this model: {_some(unexpected)}")
    if wrong:
        problems.append(f"{len(wrong)} have the wrong shape: {_some(wrong)}")
    if problems:
        raise FileError(path, "; ".join(problems) + ". Is the file complete, and for this model? Get it again.")


def _some(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def _common_dtype(module: torch.nn.Module) -> torch.dtype:
    dtypes = [parameter.dtype for parameter in module.parameters()]
    return max(set(dtypes), key=dtypes.count) if dtypes else torch.float32
