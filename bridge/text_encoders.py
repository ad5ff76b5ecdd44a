"""Which text-encoder files are ours, and how they become the object that ComfyUI's nodes pass on."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.supported_models_base
import comfy.text_encoders.t5
import comfy.utils
import torch

from ..checkpoints.stored_config import TEXT_ENCODER_CONFIG, entries_of
from ..files.errors import FileError
from ..files.header import read_header
from ..supported_models import ARCHITECTURE_ENTRY, Architecture, get_architecture, import_dotted, prompt_readers
from ..text_encoders.families import TextEncoder, find_text_encoder
from ..text_encoders.prompt import Prompt, instruction_ids
from ..text_encoders.tokenizer import (
    JSON_TENSOR,
    SPIECE_TENSOR,
    MissingTokenizer,
    Tokenizer,
    bytes_tensor,
    tensor_bytes,
)
from .clip import PromptTokenizer, TextEncoderModel
from .hooks import current_file, guarded, log, remember_file, wrap_once
from .quantized import layer_formats, logical_shapes, unknown_format

# ComfyUI's detect_te_model finds many of our families' keys familiar; these verdicts are right, all others mistakes
# that end in a size mismatch or in NaN. By name, because older versions lack some.
_CORE_IS_RIGHT = {
    "qwen3": {"QWEN3_06B": (1024,), "QWEN3_2B": (2048,), "QWEN3_4B": (2560,), "QWEN3_8B": (4096,)},
    "qwen3_vl": {
        "QWEN3_06B": (1024,),
        "QWEN3_2B": (2048,),
        "QWEN3_4B": (2560,),
        "QWEN3_8B": (4096,),
        "QWEN3VL_4B": (2560,),
        "QWEN3VL_8B": (4096,),
        "QWEN3VL_32B": (5120,),
    },
    "gemma2": {"GEMMA_2_2B": (2304,)},
    "t5gemma": {"T5_GEMMA": (768,)},
    "t5xxl": {"T5_XXL": (4096,), "T5_XL": (2048,), "T5_BASE": (768,)},
}
# ComfyUI's own loaders of these read no tokenizer from the file: a file with one was written for us.
_TOKENIZER_MEANS_OURS = ("qwen3", "qwen3_vl")


@dataclass(frozen=True)
class Recognised:
    """A text encoder's file. card: whose prompts it is to encode."""

    family: TextEncoder
    config: dict[str, Any]
    card: Architecture

    @property
    def prompt(self) -> Prompt:
        return self.card.prompt


def install() -> None:
    remember_file(comfy.sd, "load_clip", "ckpt_paths")
    remember_file(comfy.sd, "load_checkpoint_guess_config", "ckpt_path")
    remember_file(comfy.sd, "load_diffusion_model", "unet_path")
    wrap_once(comfy.sd, "load_text_encoder_state_dicts", _load_text_encoder_state_dicts)


def recognise(
    state_dict: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    architecture: str | None = None,
) -> Recognised | None:
    """The first reading of the file that a card has a use for. Raises ValueError for an unknown ``architecture``."""
    shapes = logical_shapes(state_dict)
    metadata = {**(metadata or {}), **_stored_config(state_dict)}
    wanted = None if architecture is None else get_architecture(architecture)
    for family, _, config in find_text_encoder(shapes, metadata):
        users = prompt_readers(family.name, config.get("hidden_size"), metadata)
        if wanted is not None:
            users = [wanted] if wanted.prompt is not None and family.name in wanted.text_encoders else []
        if users:
            return Recognised(family, config, _only_prompt(users, family))
    return None


def _only_prompt(cards: list[Architecture], family: TextEncoder) -> Architecture:
    if len({card.prompt for card in cards}) > 1:
        names = ", ".join(card.name for card in cards)
        raise FileError(
            current_file() or f"this {family.title}",
            f"several models use this text encoder ({names}) and want their prompts differently; load it with "
            "Load Text Encoder (NativeDiT) and choose one as architecture",
        )
    return cards[0]


def _stored_config(state_dict: Mapping[str, torch.Tensor]) -> dict[str, str]:
    for key, value in state_dict.items():
        if key.rpartition(".")[2] == TEXT_ENCODER_CONFIG:
            return entries_of(tensor_bytes(value))
    return {}


def core_reads(state_dict: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bool:
    """Whether ComfyUI's own loader gets this file right. What it does not know at all it takes for a CLIP-L."""
    matches = find_text_encoder(logical_shapes(state_dict), {**(metadata or {}), **_stored_config(state_dict)})
    names = {family.name for family, _, _ in matches}
    has_tokenizer = JSON_TENSOR in state_dict or SPIECE_TENSOR in state_dict
    if not matches or (has_tokenizer and names & set(_TOKENIZER_MEANS_OURS)):
        return False
    verdict = comfy.sd.detect_te_model(state_dict)
    return verdict is not None and any(
        config.get("hidden_size") in _CORE_IS_RIGHT.get(family.name, {}).get(verdict.name, ())
        for family, _, config in matches
    )


def _load_text_encoder_state_dicts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """ComfyUI's load_text_encoder_state_dicts(state_dicts, embedding_directory, clip_type, model_options, ...)."""
    names = ("state_dicts", "embedding_directory", "clip_type", "model_options", "disable_dynamic")
    named = dict(zip(names, args, strict=False)) | kwargs
    found = refusal = None
    with guarded("the look at this text encoder"):
        try:
            found = _claim(named.get("state_dicts") or [])
        except FileError as error:  # ours, but not to be used like this; ComfyUI would make a CLIP-L of it
            refusal = error
    if refusal is not None:
        raise refusal
    if found is None:
        return original(*args, **kwargs)
    own = {key: named[key] for key in ("embedding_directory", "disable_dynamic") if key in named}
    return build_clip(named["state_dicts"][0], found, model_options=named.get("model_options"), **own)


def _claim(state_dicts: list[Mapping[str, torch.Tensor]]) -> Recognised | None:
    if len(state_dicts) != 1:
        return None
    header = _header_of(current_file())
    found = None if core_reads(state_dicts[0], header) else recognise(state_dicts[0], header)
    if found is not None:
        log.info("NativeDiT: loads this %s for the prompts of %s", found.family.title, found.card.title)
    return found


def _header_of(path: str | None) -> Mapping[str, str]:
    """ComfyUI has read the header already but does not hand it on."""
    if path is None or not path.endswith((".safetensors", ".sft")):
        return {}
    try:
        return read_header(path).metadata
    except (FileError, OSError):
        return {}


def build_clip(
    state_dict: dict[str, torch.Tensor],
    found: Recognised,
    *,
    model_options: Mapping[str, Any] | None = None,
    embedding_directory: Any = None,
    **options: Any,
) -> comfy.sd.CLIP:
    """A CLIP from a text encoder's own file. Raises FileError; MissingTokenizer when the tokenizer is nowhere."""
    path = current_file() or f"this {found.family.title}"
    problem = unknown_format(state_dict)
    if problem is not None:
        raise FileError(path, problem)
    model_options = dict(model_options or {})
    model_options.setdefault("dtype", storage_dtype(state_dict))
    return comfy.sd.CLIP(
        target(found, state_dict, path),
        embedding_directory=embedding_directory,
        tokenizer_data=state_dict,
        parameters=comfy.utils.calculate_parameters(state_dict),
        state_dict=[state_dict],
        model_options=model_options,
        **options,
    )


def target(found: Recognised, state_dict: Mapping[str, torch.Tensor], path: str, prefix: str = ""):
    """ComfyUI's ClipTarget: how to make tokenizer and model. prefix: of the tokenizer's tensors."""
    tokenizer = _tokenizer(found, state_dict, path, prefix)
    tokenizer.check_vocabulary(found.config["vocab_size"], path)
    make_tokenizer = functools.partial(
        PromptTokenizer,
        name=found.family.name,
        tokenizer=tokenizer,
        prompt=found.prompt,
        extra=_travelling_config(found, state_dict),
    )
    clip_target = comfy.supported_models_base.ClipTarget(make_tokenizer, TextEncoderModel)
    clip_target.params = {
        "family": found.family,
        "config": found.config,
        "prompt": found.prompt,
        "storage_dtype": storage_dtype(state_dict),
        "pad_id": tokenizer.pad_id,
        "path": path,
        "quantized": bool(layer_formats(state_dict)),
        "instruction": instruction_ids(tokenizer, found.prompt),
    }
    return clip_target


def _tokenizer(found: Recognised, state_dict: Mapping[str, torch.Tensor], path: str, prefix: str) -> Tokenizer:
    """The file's, the one beside it, or the one that ComfyUI itself brings for this family."""
    try:
        return Tokenizer.find(state_dict, path, prefix)
    except MissingTokenizer:
        if found.family.name != "t5xxl":
            raise
        brought = Tokenizer.from_path(Path(inspect.getfile(comfy.text_encoders.t5)).with_name("t5_tokenizer"))
        if brought is None:
            raise
        return brought


def _travelling_config(found: Recognised, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The configuration as a tensor, where a saved file's keys and shapes would be read differently."""
    weights = {key: value for key, value in state_dict.items() if not key.endswith(TEXT_ENCODER_CONFIG)}
    try:
        again = recognise(weights)
    except FileError:  # the header alone tells whose prompts it encodes
        again = None
    if (
        again is not None
        and (again.family, again.prompt) == (found.family, found.prompt)
        and _same(again.family, again.config, found.config)
    ):
        return {}
    config = {"family": found.family.name, **found.config}
    text = json.dumps({"text_encoder": config, ARCHITECTURE_ENTRY: found.card.name})
    return {TEXT_ENCODER_CONFIG: bytes_tensor(text.encode())}


def _same(family: TextEncoder, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    options = import_dotted(family.config)
    return options(**first) == options(**second)


def storage_dtype(state_dict: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The dtype of most weights that are not quantized."""
    quantized = layer_formats(state_dict)
    counts: dict[torch.dtype, int] = {}
    for key, value in state_dict.items():
        if value.is_floating_point() and key.rpartition(".")[0] not in quantized:
            counts[value.dtype] = counts.get(value.dtype, 0) + value.numel()
    return max(counts, key=counts.get) if counts else torch.bfloat16


def split_text_encoder(state_dict: Mapping[str, torch.Tensor], prefixes: list[str]) -> dict[str, torch.Tensor]:
    """The text encoder's part of an all-in-one file, without the prefix."""
    for prefix in prefixes:
        part = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        if part:
            return part
    return {}


def clip_target_of(card: Architecture, state_dict: Mapping[str, torch.Tensor], prefixes: list[str]):
    """The ClipTarget for the text encoder inside an all-in-one file of this card, None if there is none."""
    part = split_text_encoder(state_dict, prefixes)
    if not part:
        return None
    path = current_file() or f"this {card.title} checkpoint"
    found = recognise(part, _header_of(current_file()), card.name)
    if found is None:
        wanted = " or ".join(card.text_encoders)
        raise FileError(path, f"holds a text encoder that {card.title} can't use; it wants {wanted}")
    problem = unknown_format(part)
    if problem is not None:
        raise FileError(path, problem)
    return target(found, part, path)
