"""LoRA files baked into a copy of the weights they change; the rest of the model is shared with the original."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ..checkpoints.lora_fit import Fit
from ..files.errors import FileError
from ..files.source import open_source
from ..ldm.layers.operations import CastOps

__all__ = ["LoraFile", "apply_lora", "diffusion_names", "text_encoder_names"]

_SUFFIXES = {
    "down": r"lora_A(?:\.default)?\.weight|lora_down\.weight|lora\.down\.weight|lora_linear_layer\.down\.weight",
    "up": r"lora_B(?:\.default)?\.weight|lora_up\.weight|lora\.up\.weight|lora_linear_layer\.up\.weight",
    "alpha": r"alpha",
}
_KEY = rf"^(.+)\.(?:{'|'.join(f'(?P<{name}>{pattern})' for name, pattern in _SUFFIXES.items())})$"
# Adapters that ComfyUI knows besides: without their magnitudes the pairs of a DoRA are another change.
_BESIDE = ("diff", "diff_b", "set_weight")
_OTHER_KINDS = ("dora_scale", "lora_magnitude_vector", r"hada_\w+", r"lokr_\w+", r"oft_\w+", *_BESIDE)
_OTHERS = rf"\.({'|'.join(_OTHER_KINDS)})(?:\.weight)?$"
_TEXT_ENCODER = r"^(?:lora_te\d?_|text_encoders?\.|te\d?\.)"


@dataclass
class LoraFile:
    """layers: name in the file -> {"down", "up", "alpha"}; unread: keys of kinds that the engine does not apply."""

    path: str
    layers: dict[str, dict[str, torch.Tensor]]
    unread: list[str]

    @classmethod
    def read(cls, path: str | os.PathLike) -> LoraFile:
        """Raises FileError when the file holds no LoRA, or kinds of adapters that are not pairs of down and up."""
        with open_source(path) as source:
            layers: dict[str, dict[str, torch.Tensor]] = {}
            unread = []
            for key in source:
                if match := re.match(_KEY, key):
                    layers.setdefault(match[1], {})[match.lastgroup] = source.read(key)
                else:
                    unread.append(key)
        whole = {name: parts for name, parts in layers.items() if {"down", "up"} <= parts.keys()}
        others = {match[1] for key in unread if (match := re.search(_OTHERS, key))}
        if others and not (whole and others <= {*_BESIDE}):
            found = ", ".join(sorted(others))
            raise FileError(
                path,
                f"holds adapters of a kind that ComfyUI applies and the embedded engine does not ({found}); run the "
                "workflow in ComfyUI, for example with --server URL",
            )
        if not whole:
            raise FileError(path, f"holds no LoRA (pairs of down and up weights); its first keys: {unread[:3]}")
        unread += [f"{name}.{part}" for name in layers.keys() - whole.keys() for part in layers[name]]
        return cls(os.fspath(path), whole, unread)

    def part(self, *, text_encoder: bool) -> set[str]:
        return {name for name in self.layers if bool(re.match(_TEXT_ENCODER, name)) == text_encoder}


def diffusion_names(layers: Iterable[str], prefixes: Iterable[str]) -> dict[str, str]:
    """Every name under which trainers write a diffusion model's layer -> the layer."""
    names = {}
    for layer in layers:
        flat = layer.replace(".", "_")
        spellings = [prefix + layer for prefix in prefixes]
        spellings += [prefix + flat for prefix in ("lora_unet_", "lora_transformer_", "lycoris_")]
        for spelling in [*spellings, "base_model.model.transformer." + layer]:
            names.setdefault(spelling, layer)
    return names


def text_encoder_names(layers: Iterable[str], family: str) -> dict[str, str]:
    """The same for a text encoder. family: its name, which ComfyUI's own spelling holds."""
    names = {}
    dotted = ("text_encoder.", "text_encoder.model.", "text_encoders.", "text_encoders.model.")
    dotted += (
        f"text_encoders.{family}.transformer.model.",
        "text_encoders.transformer.model.",
        "base_model.model.",
        "base_model.model.model.",
    )
    joined = ("lora_te_", "lora_te1_", "lora_te_model_", "lora_te1_model_")
    for layer in layers:
        for spelling in [p + layer for p in dotted] + [p + layer.replace(".", "_") for p in joined]:
            names.setdefault(spelling, layer)
    return names


def apply_lora(
    module: torch.nn.Module, lora: LoraFile, wanted: set[str], names: Mapping[str, str], strength: float
) -> tuple[torch.nn.Module, str]:
    """A copy of ``module`` with ``strength`` times the LoRA added, and "n of m layers applied".

    wanted: the file's layers that are meant for this module; names: see ``diffusion_names``. Weights are added in
    float32 and kept in their own dtype; a quantized layer becomes a bfloat16 one, because its few steps could not hold
    a small change. Raises FileError when less than half of the layers fit, by name or by size.
    """
    parameters = dict(module.named_parameters())
    found, summary = _found(module, lora, wanted, names, parameters)
    changed: dict[str, torch.Tensor] = {}
    for name, layer in found.items():
        weight = changed[layer] if layer in changed else _plain_weight(module.get_submodule(layer))
        changed[layer] = _added(weight, lora.layers[name], strength)
    kept = {key: value for key, value in parameters.items() if key.removesuffix(".weight") not in changed}
    kept |= dict(module.named_buffers())
    copied = copy.deepcopy(module, {id(value): value for value in kept.values()})
    for layer, weight in changed.items():
        _put(copied, layer, torch.nn.Parameter(weight, requires_grad=False))
    return copied, summary


def _found(
    module: torch.nn.Module, lora: LoraFile, wanted: set[str], names: Mapping[str, str], parameters: Mapping
) -> tuple[dict[str, str], str]:
    """({the file's layer: the module's}, the summary) of those that fit. Raises FileError when too few do."""
    fit = Fit(len(wanted), "model")
    found = {}
    for name in sorted(wanted):
        layer = names.get(name)
        if f"{layer}.weight" not in parameters:
            fit.missing.append(name)
            continue
        shape, own = _changed_shape(lora, name), _shape(module.get_submodule(layer))
        if shape == (own[0], math.prod(own[1:])):
            found[name] = layer
        else:
            fit.other_size[name] = (shape, own)
    summary = f"{fit.applied} of {fit.layers} layers of {os.path.basename(lora.path)} applied"
    if fit.too_little:
        raise FileError(lora.path, f"{summary}: it was made for another model; {fit.reasons()}")
    return found, f"{summary}; {fit.reasons()}" if fit.reasons() else summary


def _shape(layer: torch.nn.Module) -> tuple[int, ...]:
    quantization = getattr(layer, "quantization", None)
    return tuple(layer.weight.shape) if quantization is None else quantization.shape


def _changed_shape(lora: LoraFile, name: str) -> tuple[int, int]:
    """[out, in] of the product. Raises FileError for factors that do not fit each other."""
    up, down = (lora.layers[name][part] for part in ("up", "down"))
    if up[0].numel() != down.shape[0]:
        raise FileError(lora.path, f"the factors of {name} do not fit: {list(up.shape)} and {list(down.shape)}")
    return up.shape[0], down[0].numel()


def _plain_weight(layer: torch.nn.Module) -> torch.Tensor:
    quantized = getattr(layer, "quantization", None) is not None
    return layer.dequantized(torch.bfloat16) if quantized else layer.weight


def _put(module: torch.nn.Module, layer: str, weight: torch.nn.Parameter) -> None:
    """Gives a layer another weight; a quantized one is replaced by a plain one."""
    own = module.get_submodule(layer)
    if getattr(own, "quantization", None) is not None:
        plain = CastOps.Linear(*reversed(weight.shape), bias=own.bias is not None, device="meta")
        plain.bias = own.bias
        parent, _, last = layer.rpartition(".")
        setattr(module.get_submodule(parent), last, plain)
        own = plain
    own.weight = weight


def _added(weight: torch.Tensor, adapter: Mapping[str, torch.Tensor], strength: float) -> torch.Tensor:
    down, up = (adapter[part].to(weight.device, torch.float32).flatten(1) for part in ("down", "up"))
    alpha = adapter.get("alpha")
    scale = strength * (float(alpha) / down.shape[0] if alpha is not None else 1.0)
    return (weight.float() + scale * (up @ down).reshape(weight.shape)).to(weight.dtype)
