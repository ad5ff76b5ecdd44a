"""The two modules of a comparison, with the same weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from ..supported_models import Architecture
from .port import Inputs, Port, import_reference

__all__ = ["TIMESTEPS", "build_ours", "build_reference", "cast", "random_module", "randomise"]

# Inputs that stay in float32 whatever the model computes in: bfloat16 has three digits, and a timestep four.
TIMESTEPS = ("timestep", "timesteps")


def build_ours(
    cls: type, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """Our module with these weights, strictly; they are not copied when they have that dtype already."""
    module = cls(**config, device="meta", dtype=dtype)
    module.load_state_dict(_as(weights, dtype), strict=True, assign=True)
    return module.requires_grad_(False).train(False)


def build_reference(
    port: Port, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """The reference's module with the same weights, strictly. Raises ImportError when it is not installed."""
    cls = import_reference(port.reference)
    known = inspect.signature(cls.__init__).parameters
    arguments = {key: value for key, value in port.complete(config).items() if key in known}
    # Not on the meta device: what it computes in its constructor (tables) is no weight and must have values.
    module = cls(**arguments)
    module.load_state_dict(_as(port.reference_weights(weights), dtype), strict=True, assign=True)
    # torch's own `to`: diffusers' would leave some layers in float32, and warn.
    return torch.nn.Module.to(module, dtype).requires_grad_(False).train(False)


def _as(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in weights.items()}


def random_module(card: Architecture, config: Mapping[str, Any], generator: torch.Generator) -> torch.nn.Module:
    """Our module with random weights in float32."""
    module = card.module_class()(**config, dtype=torch.float32)
    randomise(module, generator)
    return module.requires_grad_(False).train(False)


def randomise(module: torch.nn.Module, generator: torch.Generator | None = None) -> None:
    """Weights that let every part act: models start gates and norms at 0 or 1, which would hide mistakes."""
    for name, parameter in module.named_parameters():
        fan_in = parameter.shape[-1] if parameter.ndim > 1 else 1
        with torch.no_grad():
            parameter.normal_(0.0, 0.7 * fan_in**-0.5 if parameter.ndim > 1 else 0.2, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.add_(1.0)


def cast(inputs: Inputs, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs as a host hands them over in ``dtype``; timesteps stay as they are."""
    return {k: v.to(dtype) if v.is_floating_point() and k not in TIMESTEPS else v for k, v in inputs.items()}
