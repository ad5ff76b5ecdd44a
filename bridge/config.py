"""One ComfyUI model configuration class per card, and the constructor arguments that travel with the weights."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import comfy.model_base
import comfy.supported_models_base
import torch

from ..checkpoints.stored_config import DIFFUSION_MODEL_CONFIG
from ..files.dtypes import parse_dtype
from ..supported_models import PREFIXES, Architecture, Match, Sampling
from ..text_encoders.tokenizer import bytes_tensor, tensor_bytes
from .latent import latent_format_class
from .quantized import logical_shapes, stored_tensor
from .text_encoders import clip_target_of, split_text_encoder

PIXEL_SPACE_VAE = "pixel_space_vae"
_HOST_ARGUMENTS = ("device", "dtype", "operations")


def image_model(card: Architecture) -> str:
    """The name by which ComfyUI's configuration finds the class; nobody else's begins like this."""
    return f"nativedit_{card.name}"


def match_weights(card: Architecture, state_dict: Mapping[str, torch.Tensor], prefix: str = "") -> Match | None:
    """``card.match`` on tensors; under an empty prefix the usual ones of bare model files are tried."""
    shapes = logical_shapes(state_dict)
    for start in PREFIXES if prefix == "" else (prefix,):
        match = card.match(shapes, start)
        if match is not None:
            return match
    return None


def stored_config(state_dict: Mapping[str, torch.Tensor], prefix: str) -> dict[str, str]:
    """The configuration tensor in the form of a safetensors header, {} where there is none."""
    tensor = state_dict.get(prefix + DIFFUSION_MODEL_CONFIG)
    return {} if tensor is None else {"config": tensor_bytes(tensor).decode("utf-8", "replace")}


def constructor_arguments(card: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """What of ComfyUI's ``unet_config`` (it adds its own entries) is for the module's constructor."""
    parameters = inspect.signature(card.module_class().__init__).parameters
    return {key: value for key, value in config.items() if key in parameters and key not in _HOST_ARGUMENTS}


def lost_by_shapes(card: Architecture, config: Mapping[str, Any], from_shapes: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor arguments that card and shapes alone would get wrong."""
    parameters = inspect.signature(card.module_class().__init__).parameters
    rebuilt = {key: from_shapes.get(key, parameters[key].default) for key in config}
    differing = [key for key in config if _plain(rebuilt[key]) != _plain(config[key])]
    if not differing:
        return {}
    # An argument may stand for what the constructor works out (None for half a head each): ask the modules then.
    cls = card.module_class()
    wanted, guessed = (cls(**arguments, device="meta", operations=torch.nn) for arguments in (config, rebuilt))
    held, rebuilt_held = vars(wanted), vars(guessed)

    def same(key: str) -> bool:
        return key in held and key in rebuilt_held and held[key] == rebuilt_held[key]

    return {key: config[key] for key in differing if not same(key)}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class NativeDiTConfig(comfy.supported_models_base.BASE):
    """What ComfyUI asks of a model family. Subclasses are made by ``config_class``."""

    card: Architecture
    unet_extra_config = {}  # BASE's would overwrite `num_heads`  # noqa: RUF012
    vae_key_prefix = ["vae.", "first_stage_model."]  # noqa: RUF012
    text_encoder_key_prefix = ["text_encoders.", "text_encoder.", "cond_stage_model."]  # noqa: RUF012

    def model_type(self, state_dict, prefix=""):
        return comfy.model_base.ModelType.FLOW

    def inpaint_model(self):
        return False

    def get_model(self, state_dict, prefix="", device=None):
        from .model import NativeDiTModel

        match = match_weights(self.card, state_dict, prefix)
        arguments = constructor_arguments(self.card, self.unet_config)
        self.card = self.card.of_config(arguments)
        self.sampling_settings = sampling_settings(self.card.sampling)
        self.travelling_config = lost_by_shapes(self.card, arguments, match.config) if match else {}
        return NativeDiTModel(self, device=device)

    def process_unet_state_dict(self, state_dict):
        """Keys as our module names them, from any layout the card knows; ComfyUI has taken its own prefix off."""
        match = match_weights(self.card, state_dict)
        if match is None:
            return state_dict
        weights = {part.name: part.take(value) for key, value in state_dict.items() for part in match.parts(key)}
        weights.pop(DIFFUSION_MODEL_CONFIG, None)
        return weights

    def process_unet_state_dict_for_saving(self, state_dict):
        plain = {key: stored_tensor(value) for key, value in state_dict.items()}
        state_dict = super().process_unet_state_dict_for_saving(plain)
        if self.travelling_config:
            text = json.dumps({"transformer": self.travelling_config})
            state_dict["model.diffusion_model." + DIFFUSION_MODEL_CONFIG] = bytes_tensor(text.encode())
        return state_dict

    def clip_target(self, state_dict=None):
        return clip_target_of(self.card, state_dict or {}, self.text_encoder_key_prefix)

    def process_clip_state_dict(self, state_dict):
        return split_text_encoder(state_dict, self.text_encoder_key_prefix)

    def process_vae_state_dict(self, state_dict):
        if self.card.autoencoder == "pixel_space" and not state_dict:
            return {PIXEL_SPACE_VAE: torch.tensor(1.0)}  # by which ComfyUI knows its pixel "autoencoder"
        return state_dict


def sampling_settings(sampling: Sampling) -> dict[str, float]:
    """What ComfyUI's flow sampling reads."""
    return {"shift": sampling.shift, "multiplier": sampling.multiplier, "noise_scale": sampling.noise_scale}


def config_class(card: Architecture) -> type[NativeDiTConfig]:
    """Raises what a card can get wrong: an unknown latent format or dtype."""
    return type(
        f"NativeDiT_{card.name}",
        (NativeDiTConfig,),
        {
            "card": card,
            "travelling_config": {},
            "unet_config": {"image_model": image_model(card)},
            "sampling_settings": sampling_settings(card.sampling),
            "latent_format": latent_format_class(card.latent_format),
            "memory_usage_factor": card.memory_usage_factor,
            "supported_inference_dtypes": [parse_dtype(dtype) for dtype in card.dtypes],
        },
    )
