"""Baking a LoRA into a checkpoint: every change is computed in float32 and stored in the weight's own type."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping

import torch

from ..files.dtypes import torch_dtype
from ..files.errors import FileError
from ..quant.output import Assembly
from ..quant.stream import Meter, Progress, Task, Writing
from .load import recognise
from .lora import Adapter, LoraReport, arrange, read_adapters
from .opened import Checkpoint, open_checkpoint
from .pickles import open_weights
from .save import write_assembly

_FLOATS = ("F64", "F32", "F16", "BF16")


def bake_lora(
    lora: str | os.PathLike,
    model: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    strength: float = 1.0,
    architecture: str | None = None,
    progress: Progress | None = None,
) -> LoraReport:
    """Write ``model`` with the LoRA added, in the model's own layout; everything else is copied byte for byte.

    Raises FileError: layers that the model does not have, quantized layers (start from the unquantized model), a kind
    of adapter that is not understood; OutputError; ValueError (a strength that is no number).
    """
    if not math.isfinite(strength):
        raise ValueError(f"strength {strength} is no finite number")
    with open_checkpoint(model, component="transformer") as checkpoint:
        match = recognise(checkpoint, architecture=architecture)
        with open_weights(lora) as opened:
            tensors = {key: opened.read(key) for key in opened}
        card, adapters, kept = read_adapters(os.fspath(lora), tensors, match.architecture.name)
        report = LoraReport(os.fspath(destination), card.title, kept=list(kept))
        if kept:
            report.notes.append(f"{len(kept)} keys are of a text encoder and were not baked")
        theirs = match.layout is not None and match.layout is card.two_way
        own = {k[len(match.prefix) :]: v for k, v in checkpoint.shapes.items() if k.startswith(match.prefix)}
        widths = card.two_way.shapes(own) if theirs else own
        layers = arrange(os.fspath(lora), card, adapters, "diffusers" if theirs else "comfy", widths, report)
        deltas = _by_key(checkpoint, os.fspath(lora), match.prefix, layers)
        assembly = Assembly(checkpoint.source)
        for key in checkpoint.source:
            if key in deltas:
                _add(assembly, checkpoint, key, deltas[key], strength)
            else:
                assembly.copy(key)
        write_assembly(destination, assembly, dict(checkpoint.source.metadata), Meter(assembly.read_bytes, progress))
    return report


def _by_key(
    checkpoint: Checkpoint, lora: str, prefix: str, layers: Mapping[str, Adapter]
) -> dict[str, tuple[Adapter, str]]:
    """Key of the checkpoint -> (adapter, which of its changes)."""
    quantized = {layer.keys["weight"] for layer in checkpoint.quantized.layers.values()}
    deltas: dict[str, tuple[Adapter, str]] = {}
    strange = []
    for name, adapter in layers.items():
        changes = [("diff_b", "bias")] if "diff_b" in adapter.tensors else []
        if set(adapter.tensors) - {"diff_b", "alpha"}:
            changes.append(("weight", "weight"))
        for kind, parameter in changes:
            key = f"{prefix}{name}.{parameter}"
            if key not in checkpoint.source:
                strange.append(key)
            elif key in quantized:
                raise FileError(
                    checkpoint.path,
                    f"layer {name!r} is quantized; bake the LoRA into the unquantized model and quantize the result",
                )
            deltas[key] = (adapter, kind)
    if strange:
        raise FileError(lora, f"{len(strange)} of its weights are not in {checkpoint.path}: {', '.join(strange[:5])}")
    return deltas


def _add(assembly: Assembly, checkpoint: Checkpoint, key: str, delta: tuple[Adapter, str], strength: float) -> None:
    info = checkpoint.source.info(key)
    if info.dtype not in _FLOATS:
        raise FileError(checkpoint.path, f"{key!r} is {info.dtype}; a LoRA can be baked into {', '.join(_FLOATS)} only")

    def step(writing: Writing) -> Iterator[Task]:
        def handle(weight: torch.Tensor) -> None:
            change = change_of(*delta, tuple(info.shape), checkpoint.path, key) * strength
            writing.put(key, (weight.float() + change).to(torch_dtype(info.dtype)))

        yield Task(lambda: checkpoint.source.read(key), handle, info.nbytes, key)

    assembly.computed([(key, info.dtype, info.shape)], step, info.nbytes)


def change_of(adapter: Adapter, kind: str, shape: tuple[int, ...], path: str, key: str) -> torch.Tensor:
    """What an adapter adds to a weight of ``shape``, in float32. Raises FileError."""
    tensors = {word: tensor.float() for word, tensor in adapter.tensors.items()}
    if kind == "diff_b":
        change = tensors["diff_b"]
    elif "dora_scale" in tensors or "lokr_t2" in tensors:
        raise FileError(path, f"{key!r}: DoRA and factored LoKr adapters can't be baked here; use ComfyUI's save node")
    elif "up" in tensors:
        change = tensors["up"].flatten(1) @ tensors["down"].flatten(1) * _scale(tensors, tensors["down"].shape[0])
    elif "hada_w1_a" in tensors:
        first, second = tensors["hada_w1_a"] @ tensors["hada_w1_b"], tensors["hada_w2_a"] @ tensors["hada_w2_b"]
        change = first * second * _scale(tensors, tensors["hada_w1_b"].shape[0])
    elif any(word.startswith("lokr") for word in tensors):
        change = _kronecker(tensors)
    else:
        change = tensors["diff"]
    if change.numel() != torch.Size(shape).numel():
        raise FileError(path, f"{key!r} is {list(shape)}, the LoRA's change is {list(change.shape)}: of another model?")
    return change.reshape(shape)


def _scale(tensors: Mapping[str, torch.Tensor], rank: int) -> float:
    return float(tensors["alpha"]) / rank if "alpha" in tensors else 1.0


def _kronecker(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    factors, rank = [], None
    for name in ("lokr_w1", "lokr_w2"):
        if name in tensors:
            factors.append(tensors[name])
        else:
            factors.append(tensors[f"{name}_a"] @ tensors[f"{name}_b"])
            rank = tensors[f"{name}_b"].shape[0]
    return torch.kron(*factors) * (_scale(tensors, rank) if rank else 1.0)
