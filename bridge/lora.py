"""LoRA files in every spelling that trainers use, and a clear word about those that do not fit."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import comfy.lora

from ..checkpoints.lora_fit import Fit
from .clip import TextEncoderModel
from .hooks import wrap_once
from .lora_shapes import misfit
from .model import NativeDiTModel

log = logging.getLogger(__name__)

_ENDINGS = (
    r"lora_[AB](?:\.default)?\.weight",
    r"lora_(?:down|up|mid)\.weight",
    r"lora\.(?:down|up)\.weight",
    r"lora_linear_layer\.(?:down|up)\.weight",
    *("alpha", "dora_scale", "rescale", "reshape_weight", "bias"),
    *("hada_w[12](?:_[ab])?", "hada_t[12]", "lokr_w[12](?:_[ab])?", "lokr_t2", "oft_blocks"),
    *("diff", "diff_b", "set_weight", "w_norm", "b_norm"),
)
_SUFFIX = rf"\.(?:{'|'.join(_ENDINGS)})$"
_TEXT_ENCODER = r"^(?:lora_te\d?_|text_encoders?\.|te\d?\.)"


class KeyMap(dict):
    """ComfyUI's map from a LoRA's names to weights, known to hold names of ours. parts: what it covers, the model of
    each."""

    def __init__(self, names: dict[str, Any]):
        super().__init__(names)
        self.parts: dict[str, Any] = getattr(names, "parts", {})


def install() -> None:
    wrap_once(comfy.lora, "model_lora_keys_unet", _unet_keys)
    wrap_once(comfy.lora, "model_lora_keys_clip", _clip_keys)
    wrap_once(comfy.lora, "load_lora", _load_lora)


def _unet_keys(original: Callable[..., dict], model: Any, *args: Any, **kwargs: Any) -> dict:
    names = original(model, *args, **kwargs)
    if not isinstance(model, NativeDiTModel):
        return names
    names = KeyMap(names)
    names.parts["diffusion model"] = model
    for key, target in _weights(model, "diffusion_model."):
        flat = key.replace(".", "_")
        for prefix in model.model_config.card.lora_prefixes:
            names.setdefault(prefix + key, target)
        for prefix in ("lora_unet_", "lora_transformer_", "lycoris_"):
            names.setdefault(prefix + flat, target)
        names.setdefault("base_model.model.transformer." + key, target)
    return names


def _clip_keys(original: Callable[..., dict], model: Any, *args: Any, **kwargs: Any) -> dict:
    names = original(model, *args, **kwargs)
    if not isinstance(model, TextEncoderModel):
        return names
    names = KeyMap(names)
    names.parts["text encoder"] = model
    for key, target in _weights(model, model.prefix):
        flat = key.replace(".", "_")
        for prefix in ("text_encoder.", "text_encoder.model.", "text_encoders.", "text_encoders.model."):
            names.setdefault(prefix + key, target)
        for prefix in ("text_encoders.transformer.model.", "base_model.model.", "base_model.model.model."):
            names.setdefault(prefix + key, target)
        for prefix in ("lora_te_", "lora_te1_", "lora_te_model_", "lora_te1_model_"):
            names.setdefault(prefix + flat, target)
    return names


def _weights(model: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """(layer's name, name of its weight in ComfyUI's model)"""
    for key in model.state_dict():
        if key.startswith(prefix) and key.endswith(".weight"):
            yield key[len(prefix) : -len(".weight")], key


def _load_lora(original: Callable[..., dict], lora: Any, to_load: Any, *args: Any, **kwargs: Any) -> dict:
    patches = original(lora, to_load, *args, **kwargs)
    if isinstance(to_load, KeyMap):
        if not patches and not any(re.search(_SUFFIX, key) for key in lora):
            raise ValueError(
                f"this file holds no layer of a LoRA: {', '.join(sorted(lora)[:3]) or 'it is empty'}. "
                "`nativedit inspect` says what it is"
            )
        report_fit(lora, to_load, patches)
    return patches


def report_fit(lora: dict, names: KeyMap, patches: dict) -> None:
    """One line when a LoRA fits in part. Raises ValueError when less than half of it fits: it is for another model."""
    layers = {re.sub(_SUFFIX, "", key) for key in lora if re.search(_SUFFIX, key)}
    # Loaded for one part alone: the layers of the other are left out on purpose.
    if set(names.parts) == {"diffusion model"}:
        layers = {layer for layer in layers if not re.match(_TEXT_ENCODER, layer)}
    elif set(names.parts) == {"text encoder"}:
        layers = {layer for layer in layers if re.match(_TEXT_ENCODER, layer)}
    fit = Fit(len(layers), " and ".join(sorted(names.parts)))
    for layer in sorted(layers):
        if layer not in names:
            fit.missing.append(layer)
        elif sizes := misfit(patches.get(names[layer]), names[layer], names.parts.values()):
            fit.other_size[layer] = sizes
    if fit.applied == fit.layers:
        return
    summary = f"{fit.applied} of {fit.layers} layers of this LoRA applied"
    if fit.too_little:
        doubt = ", or saved in a layout that NativeDiT does not know" if fit.missing else ""
        raise ValueError(f"{summary}: it was made for another model{doubt}; {fit.reasons()}")
    log.warning("NativeDiT: %s; %s", summary, fit.reasons())
