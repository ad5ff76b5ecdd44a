"""What a model's layers were given while a graph ran: gathered by hooks, kept in a small file, used by quantize.

A file of statistics is a safetensors file. Per layer it holds two vectors in float32, with one number per input
channel: the largest magnitude and the mean square. Its header says how they were gathered. Layer names are the model's
own, without a file's prefix.
"""
# The keys are LAYER.input_amax and LAYER.input_power, both F32 [K].

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..files import SafetensorsWriter, open_source
from .errors import QuantError
from .policy import PREFIXES

__all__ = ["METADATA_KEY", "Calibration", "Inputs", "Watcher", "read_calibration", "write_calibration"]

METADATA_KEY = "nativedit.calibration"
_AMAX, _POWER = ".input_amax", ".input_power"


@dataclass(frozen=True)
class Inputs:
    """Of one layer: ``amax`` and ``power`` [K], fp32."""

    amax: torch.Tensor
    power: torch.Tensor


@dataclass(frozen=True)
class Calibration:
    """Statistics by layer name; ``about`` says where they come from."""

    path: str
    layers: Mapping[str, Inputs]
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, layer: str, columns: int) -> Inputs | None:
        """The statistics of a file's layer, with or without the file's prefix; None where the layer did not run.

        Raises QuantError when the layer had another number of inputs."""
        found = self.layers.get(layer) or self.layers.get(bare(layer))
        if found is not None and found.amax.shape != (columns,):
            raise QuantError(
                self.path,
                f"has statistics of {found.amax.numel()} input channels for the layer {layer!r}, which has {columns}: "
                "they were gathered with another model. Run nativedit calibrate with this one",
            )
        return found

    def powers(self, layers: Iterable[str]) -> dict[str, torch.Tensor]:
        """Those of the file's ``layers`` that ran -> mean square of every input channel [K], as
        `measure.weighted_sqnr` wants it."""
        found = {layer: self.layers.get(layer) or self.layers.get(bare(layer)) for layer in layers}
        return {layer: inputs.power for layer, inputs in found.items() if inputs is not None}


def bare(layer: str) -> str:
    """A layer's name without the prefix that a file puts before a model's names."""
    return next((layer[len(prefix) :] for prefix in PREFIXES if layer.startswith(prefix)), layer)


class Watcher:
    """Gathers the statistics of every linear layer of a module while it runs.

    ``with watcher.on(module): ...``; sums are kept in float64 on the CPU, the maxima in float32."""

    def __init__(self) -> None:
        self._amax: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._rows: dict[str, int] = {}

    @contextmanager
    def on(self, module: torch.nn.Module) -> Iterator[Watcher]:
        hooks = [
            layer.register_forward_pre_hook(self._hook(name))
            for name, layer in module.named_modules()
            if hasattr(layer, "in_features") and hasattr(layer, "out_features")
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        def hook(layer: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0] if inputs else None
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel():
                self.add(name, x)

        return hook

    def add(self, name: str, x: torch.Tensor) -> None:
        """``x`` [..., K]: what layer ``name`` is given."""
        with torch.no_grad():
            rows = x.detach().reshape(-1, x.shape[-1]).float()
            amax, total = rows.abs().amax(0).cpu(), rows.square().sum(0).double().cpu()
        if name in self._rows:
            amax, total = torch.maximum(amax, self._amax[name]), total + self._sums[name]
        self._amax[name], self._sums[name] = amax, total
        self._rows[name] = self._rows.get(name, 0) + rows.shape[0]

    def calibration(self, **about: Any) -> Calibration:
        """Raises ValueError when no layer ran."""
        if not self._rows:
            raise ValueError("no linear layer of the model ran: nothing was sampled, so there are no statistics")
        layers = {
            name: Inputs(self._amax[name], (self._sums[name] / self._rows[name]).float()) for name in sorted(self._rows)
        }
        return Calibration("", layers, {"rows": max(self._rows.values()), **about})


def write_calibration(calibration: Calibration, path: str | os.PathLike) -> None:
    """Complete or not at all. Raises ValueError for infinite or NaN activations, OutputError."""
    tensors: dict[str, torch.Tensor] = {}
    for name, inputs in calibration.layers.items():
        if not bool(torch.isfinite(inputs.amax).all() & torch.isfinite(inputs.power).all()):
            raise ValueError(
                f"layer {name!r} was given infinite or NaN numbers: the model does not run rightly in this precision; "
                "calibrate with another one"
            )
        tensors[name + _AMAX], tensors[name + _POWER] = inputs.amax, inputs.power
    entries = [(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    metadata = {METADATA_KEY: json.dumps({"version": 1, **calibration.about})}
    with SafetensorsWriter(path, entries, metadata) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor.contiguous())


def read_calibration(path: str | os.PathLike) -> Calibration:
    """Raises FileError, or QuantError for a file that holds no statistics."""
    with open_source(path) as source:
        layers = {
            name.removesuffix(_AMAX): Inputs(source.read(name), source.read(name.removesuffix(_AMAX) + _POWER))
            for name in source
            if name.endswith(_AMAX) and name.removesuffix(_AMAX) + _POWER in source.tensors
        }
        if not layers:
            raise QuantError(os.fspath(path), "holds no statistics of activations; nativedit calibrate makes them")
        about = json.loads(source.metadata.get(METADATA_KEY, "{}"))
    return Calibration(os.fspath(path), layers, about)
