"""comfy_quant layers in a state dict: what ComfyUI of this version can hold, and the shapes behind packed weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import comfy.quant_ops
import torch

from ..checkpoints.fill import check_keys, fit
from ..files.errors import FileError
from ..files.memory import MemoryWriter
from ..files.source import Source
from ..quant.dequantize import add_dequantized
from ..quant.formats import FORMATS, round_up
from ..quant.layer import Layer
from ..quant.markers import MARKER, parse_marker
from ..quant.output import Assembly
from ..quant.stream import Meter, Writing, run_tasks
from ..supported_models import Shapes
from .hooks import comfyui_version

log = logging.getLogger(__name__)


def layer_formats(state_dict: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, str]:
    """{layer: name of its format} by the markers under ``prefix``; names keep the prefix. Never raises."""
    formats = {}
    for key, value in state_dict.items():
        if key.startswith(prefix) and key.endswith("." + MARKER):
            try:
                marker = parse_marker(value.cpu().numpy().tobytes())
            except ValueError:
                marker = {"format": "(unreadable marker)"}
            if marker is not None:
                formats[key.removesuffix("." + MARKER)] = str(marker.get("format"))
    return formats


def logical_shapes(state_dict: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """{key: shape}, with the width of weights that pack several values into a byte undone."""
    shapes = {key: tuple(value.shape) for key, value in state_dict.items()}
    for layer, name in layer_formats(state_dict).items():
        packing = FORMATS[name].packing if name in FORMATS else 1
        weight = shapes.get(f"{layer}.weight")
        if packing > 1 and weight:
            shapes[f"{layer}.weight"] = (*weight[:-1], weight[-1] * packing)
    return shapes


def stored_tensor(value: torch.Tensor) -> torch.Tensor:
    """The codes of a quantized weight. ComfyUI 0.8 hands the wrapper to its save nodes, which then write garbage."""
    return value._qdata if isinstance(value, comfy.quant_ops.QuantizedTensor) else value


def unknown_format(state_dict: Mapping[str, torch.Tensor], prefix: str = "") -> str | None:
    """A sentence on the first layer whose format this ComfyUI can't read, None if it reads all of them."""
    for layer, name in layer_formats(state_dict, prefix).items():
        if name in comfy.quant_ops.QUANT_ALGOS:
            continue
        needed = FORMATS[name].since.get("linear") if name in FORMATS else None
        advice = f"it needs ComfyUI {needed} or newer" if needed else "no ComfyUI that NativeDiT knows reads it"
        return f"layer {layer!r} is quantized as {name}, which ComfyUI {comfyui_version()} does not read; {advice}"
    return None


def report_unknown_format(state_dict: Mapping[str, torch.Tensor], prefix: str) -> None:
    """One line for a file that is not ours: ComfyUI goes on and fails with a bare KeyError that says less."""
    problem = unknown_format(state_dict, prefix)
    if problem is not None:
        log.warning("NativeDiT: %s", problem)


def applies_input_factors() -> bool:
    """Whether this ComfyUI multiplies the input of a layer by factors that come with it."""
    # By `pre_quant_scale`: from 0.30 on.
    return "pre_quant_scale" in comfy.quant_ops.QUANT_ALGOS.get("nvfp4", {}).get("parameters", ())


def unheld_layers(layers: Mapping[str, Layer]) -> list[Layer]:
    """Those with a factor of the layer's input, which ComfyUI before 0.30 leaves out without a word."""
    if applies_input_factors():
        return []
    return [layer for layer in layers.values() if "pre_quant_scale" in layer.keys]


def undo_unheld(tensors: dict[str, torch.Tensor], source: Source, layers: Mapping[str, Layer]) -> None:
    """Such layers of a state dict made from ``source`` become bfloat16, with the factor in the weight."""
    undone = unheld_layers(layers)
    for layer in undone:
        assembly = Assembly(source)
        add_dequantized(assembly, source, layer, torch.bfloat16)
        memory = MemoryWriter(assembly.entries)
        with Writing(memory) as writing:
            run_tasks(assembly.tasks(writing), Meter(0, None))
        for suffix in (*layer.keys, MARKER):
            if suffix != "bias":
                tensors.pop(f"{layer.name}.{suffix}", None)
        tensors.update(memory.tensors)
    if undone:
        log.info(
            "NativeDiT: %d layers are loaded as bfloat16: ComfyUI %s does not apply their pre_quant_scale",
            len(undone),
            comfyui_version(),
        )


def check_weights(
    path: str,
    expected: Shapes,
    weights: Mapping[str, torch.Tensor],
    module_of: Callable[[str], torch.nn.Module] | None = None,
) -> None:
    """Raises FileError unless these are exactly the weights of a module, some of its layers perhaps quantized.

    Expected are the shapes of the unquantized module by key; the last argument finds a live layer by its name.
    ComfyUI itself only warns about missing weights, and with its dynamic memory manager takes any shape.
    """
    formats = layer_formats(weights)
    found = {}
    for key, value in weights.items():
        layer, _, name = key.rpartition(".")
        if layer not in formats:
            if name != MARKER:  # an empty marker says: this layer is not quantized
                found[key] = fit(expected, key, tuple(value.shape))
        elif name == "weight" and _rows_fit(expected.get(key), tuple(value.shape)):
            found[key] = expected[key]
        elif name in ("weight", "bias"):
            found[key] = tuple(value.shape)
    check_keys(path, expected, found)
    for layer, name in formats.items():
        if module_of is not None and not _holds_quantized(module_of(layer)):
            kind = type(module_of(layer)).__name__
            raise FileError(
                path,
                f"layer {layer!r} is quantized as {name}, but ComfyUI {comfyui_version()} can't hold a quantized "
                f"{kind}; update ComfyUI, or get a file in which this layer is not quantized",
            )


def _rows_fit(expected: tuple[int, ...] | None, stored: tuple[int, ...]) -> bool:
    """Packing and padding change a weight's columns; rows are at most padded."""
    if expected is not None and expected[2:] == (1, 1) and len(stored) == 2:
        expected = expected[:2]  # a 1x1 convolution that our module computes as a matrix
    if expected is None or len(expected) != len(stored):
        return False
    return stored[:-2] == expected[:-2] and expected[-2] <= stored[-2] <= round_up(expected[-2], 32)


def _holds_quantized(module: torch.nn.Module) -> bool:
    """ComfyUI's layers read quantized entries in a loading function of their own; torch's have the default one."""
    return type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
