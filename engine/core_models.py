"""Models that ComfyUI's core has, outside of ComfyUI: diffusers' class with the weights of a file in any layout.

Quantized layers stay as they are stored: fused ones are split without a code changing, and joined again on saving.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..checkpoints import diffusion
from ..checkpoints.moves import Move
from ..checkpoints.opened import checkpoint_of, open_checkpoint
from ..checkpoints.save import write_file
from ..files.errors import FileError
from ..files.memory import MemoryWriter, TensorSource
from ..quant.markers import MARKER
from ..quant.ops import QuantOps
from ..quant.stream import Meter, Writing, run_tasks
from ..supported_models import Match

__all__ = ["load_core_model", "save_core_model"]


def load_core_model(
    path: str | os.PathLike, *, architecture: str | None = None, device: str | torch.device = "cpu"
) -> torch.nn.Module:
    """The diffusers model of a file (ComfyUI's layout, diffusers', with a prefix, quantized) or of a folder, in eval
    mode, its weights as stored. architecture: a card's name, None = recognise.

    Raises FileError: missing or unknown keys by name; a model that diffusers has no class for; ImportError.
    """
    import diffusers

    with open_checkpoint(path, component="transformer") as checkpoint:
        match, move, config = diffusion.to_diffusers(checkpoint, architecture)
        name = config["_class_name"]
        try:
            cls = operator.attrgetter(name)(diffusers)  # which imports it only now
        except AttributeError:
            raise FileError(path, f"is {match.architecture.title}; this diffusers has no {name}") from None
        with _parameters_on_meta():
            module = cls(**{key: value for key, value in config.items() if not key.startswith("_")})
        state = _read(move)
        _hold_quantized(module, state)
        try:
            module.load_state_dict({key: value.to(device) for key, value in state.items()}, strict=True, assign=True)
        except RuntimeError as error:
            raise FileError(path, str(error)) from error
    return module.to(device).requires_grad_(False).train(False)


def save_core_model(module: torch.nn.Module, destination: str | os.PathLike) -> Match:
    """Write a diffusers model of such an architecture as a ComfyUI file. Raises FileError, OutputError."""
    source = TensorSource(type(module).__name__, module.state_dict())
    source.config = {**module.config, "_class_name": type(module).__name__}
    checkpoint = checkpoint_of(source)
    match, move, _ = diffusion.to_comfy(checkpoint)
    write_file(destination, [("", move)], {})
    return match


def _read(move: Move) -> dict[str, torch.Tensor]:
    assembly = move.assembly()
    memory = MemoryWriter(assembly.entries)
    with Writing(memory) as writing:
        run_tasks(assembly.tasks(writing), Meter(0, None))
    return memory.tensors


def _hold_quantized(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Linear layers whose weights are quantized become layers that know how."""
    for key in state:
        name, _, suffix = key.rpartition(".")
        if suffix != MARKER:
            continue
        parent, _, own = name.rpartition(".")
        place = module.get_submodule(parent)
        plain: Any = place.get_submodule(own)
        bias = plain.bias is not None
        setattr(place, own, QuantOps.Linear(plain.in_features, plain.out_features, bias=bias, device="meta"))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside hold no memory for their weights; buffers (tables that no file has) are real."""
    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = torch.nn.Parameter(param.detach().to("meta"), requires_grad=False)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
