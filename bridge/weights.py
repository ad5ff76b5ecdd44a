"""The weights of a model in the graph as a source to read from: patches baked when a layer is asked for.

The model is only read. A weight that ComfyUI has patched in place for sampling is taken from its backup.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.quant_ops
import comfy.utils
import torch

from ..files.errors import FileError
from ..files.memory import Lazy, TensorSource
from ..quant.errors import QuantError
from ..quant.formats import Recipe
from ..quant.markers import MARKER, RECORD_KEY, Provenance, parse_marker
from ..quant.reader import read_quantized
from .quantized import stored_tensor

log = logging.getLogger(__name__)

SAVED_PREFIX = "model.diffusion_model."
Entries = dict[str, "torch.Tensor | Lazy"]


class Baking:
    """Counts the weights whose patches ComfyUI left out: it logs that and goes on, at run time as here."""

    def __init__(self) -> None:
        self.weights: set[str] = set()
        self.misfits: set[str] = set()

    def calculate(self, patcher: Any, value: torch.Tensor, key: str) -> torch.Tensor:
        with _heard() as messages:
            value = comfy.lora.calculate_weight(patcher.patches[key], value, key)
        if any(message.startswith(("ERROR", "WARNING SHAPE MISMATCH")) for message in messages):
            self.misfits.add(key.removeprefix("diffusion_model."))
        return value

    def summary(self) -> str:
        """A sentence on patches that were left out, "" when all fit."""
        if not self.misfits:
            return ""
        names, total = sorted(self.misfits), len(self.weights)
        found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return f"{total - len(names)} of {total} patched weights took their patches; the others' do not fit: {found}"


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """What this thread logs meanwhile."""
    messages: list[str] = []
    handler, thread = logging.Handler(logging.WARNING), threading.get_ident()
    handler.emit = lambda record: messages.append(record.getMessage()) if record.thread == thread else None
    logging.getLogger().addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger().removeHandler(handler)


@dataclass
class Weights:
    """``source`` by the names that files have; ``requantize``: layers whose codes a patch has made invalid, and how
    they were stored. They are floats in ``source``. ``baking`` tells, once all was read, which patches did not fit."""

    source: TensorSource
    requantize: dict[str, Recipe]
    baking: Baking


def diffusion_weights(patcher: Any, title: str = "the model in the graph") -> Weights:
    """Of a MODEL, in ComfyUI's layout without a prefix (with one where the model has keys beside its own)."""
    baking = Baking()
    entries, requantize = patched_entries(patcher, "diffusion_model.", baking)
    named, constants = _names_for_saving(patcher, list(entries))
    renamed = {named[key]: value for key, value in entries.items() if key in named}
    layers = {named[f"{layer}.weight"].removesuffix(".weight"): recipe for layer, recipe in requantize.items()}
    start = SAVED_PREFIX if _may_lose_prefix({*renamed, *constants}) else ""
    tensors = {key.removeprefix(start): value for key, value in {**renamed, **constants}.items()}
    shapes = {
        named[key].removeprefix(start).removesuffix(".weight"): shape
        for key, shape in _true_shapes(patcher, "diffusion_model.", entries).items()
        if key in named
    }
    source = TensorSource(title, tensors, {**header_of(patcher), **_noted(tensors, shapes)})
    return Weights(source, {layer.removeprefix(start): recipe for layer, recipe in layers.items()}, baking)


def _true_shapes(patcher: Any, prefix: str, entries: Entries) -> dict[str, tuple[int, ...]]:
    """Of quantized weights that are stored as they are: their codes may be packed or padded."""
    shapes = {}
    for key in entries:
        layer, _, name = key.rpartition(".")
        if name == "weight" and f"{layer}.{MARKER}" in entries:
            shapes[key] = tuple(comfy.model_patcher.get_key_weight(patcher.model, prefix + key)[0].shape)
    return shapes


def _noted(tensors: Entries, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The true shapes in the form in which our own files have them."""
    layers = {}
    for layer, shape in shapes.items():
        marker = parse_marker(tensors[f"{layer}.{MARKER}"].cpu().numpy().tobytes())
        if marker is not None:
            layers[layer] = {"marker": marker, "shape": list(shape), "crc32": "0" * 8}
    return {RECORD_KEY: Provenance(layers=layers).encode()} if layers else {}


def patched_entries(patcher: Any, prefix: str = "", baking: Baking | None = None) -> tuple[Entries, dict[str, Recipe]]:
    """({key below ``prefix``: tensor}, {layer: recipe of the codes that its patches replace}).

    Raises FileError for a weight that is a placeholder."""
    model = patcher.model
    baking = baking or Baking()
    module = comfy.utils.get_attr(model, prefix.removesuffix(".")) if prefix else model
    entries: Entries = {key: stored_tensor(value) for key, value in module.state_dict().items()}
    markers = {key: value for key, value in entries.items() if key.endswith("." + MARKER)}
    requantize: dict[str, Recipe] = {}
    for key in [key for key in entries if key.rpartition(".")[2] not in ("", MARKER)]:
        full = prefix + key
        patched, backup = _is_patched(patcher, full), _backup(patcher, full)
        if not patched and backup is None:
            continue
        weight, _, convert = comfy.model_patcher.get_key_weight(model, full)
        weight = weight if backup is None else backup
        if not isinstance(weight, comfy.quant_ops.QuantizedTensor):
            entries[key] = _lazy(patcher, full, weight, convert, baking) if patched else weight
            continue
        stored = {name: stored_tensor(value) for name, value in weight.state_dict(key).items()}
        if not patched:
            entries.update(stored)
            continue
        layer = key.removesuffix(".weight")
        recipe = _recipe(layer, stored, markers.get(f"{layer}.{MARKER}"))
        extra = {name: entries.pop(f"{layer}.{name}", None) for name in ("pre_quant_scale", "input_scale")}
        for name in [*stored, f"{layer}.{MARKER}"]:
            entries.pop(name, None)
        entries[key] = _lazy(patcher, full, weight, convert, baking, extra["pre_quant_scale"])
        requantize[layer] = recipe
    for key, value in entries.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise FileError(
                f"the {type(model).__name__} model in the graph",
                f"{prefix + key!r} is a placeholder without data: it was not loaded yet, or a node took it away; "
                "sample once with this model, or load it anew",
            )
    return entries, requantize


def _is_patched(patcher: Any, key: str) -> bool:
    """Whether patches change the weight: those of strength 0 do not, and rounding it anew for them would."""
    return any(strength != 0 or strength_model != 1 for strength, _, strength_model, *_ in patcher.patches.get(key, ()))


def _backup(patcher: Any, key: str) -> torch.Tensor | None:
    """The weight as it was before ComfyUI patched it in place for sampling, None when it did not."""
    hooked = patcher.hook_backup.get(key)
    if hooked is not None:
        return hooked[0]
    backup = patcher.backup.get(key)
    return None if backup is None else backup.weight


def _lazy(
    patcher: Any,
    key: str,
    weight: torch.Tensor,
    convert: Callable[..., torch.Tensor] | None,
    baking: Baking,
    input_factor: torch.Tensor | None = None,
) -> Lazy:
    """The weight with its patches, as ComfyUI computes it for sampling. What was quantized is a float32.

    input_factor: a factor of the layer's input, folded into the weight because the new codes are made without it."""
    baking.weights.add(key)
    quantized = isinstance(weight, comfy.quant_ops.QuantizedTensor)
    dtype = torch.float32 if quantized else weight.dtype

    @torch.no_grad()  # made in a thread of ours, where ComfyUI's inference mode does not hold
    def make() -> torch.Tensor:
        device = patcher.load_device
        between = torch.float32 if quantized else comfy.model_management.lora_compute_dtype(device)
        value = comfy.model_management.cast_to_device(weight, device, between, copy=True)
        if convert is not None:
            value = convert(value, inplace=True)
        if isinstance(value, comfy.quant_ops.QuantizedTensor):
            value = value.dequantize()
        value = baking.calculate(patcher, value, key)
        if input_factor is not None:
            value = value * input_factor.to(value)
        seed = _string_to_seed(key)
        return comfy.float.stochastic_rounding(value, dtype, seed=seed).to("cpu")

    return Lazy(dtype, tuple(weight.shape), make)


def _string_to_seed(text: str) -> int:
    where = comfy.utils if hasattr(comfy.utils, "string_to_seed") else comfy.model_patcher  # moved after ComfyUI 0.8
    return getattr(where, "string_to_seed")(text)  # noqa: B009 - a name that not every version has in one place


def _recipe(layer: str, stored: Mapping[str, torch.Tensor], marker: torch.Tensor | None) -> Recipe:
    """How the layer was stored. A float8 weight is multiplied in full precision from now on: nobody has measured the
    input of the patched layer."""
    note = {} if marker is None else {f"{layer}.{MARKER}": marker}
    found = read_quantized(TensorSource("the model in the graph", {**stored, **note}))
    found.refuse_problems()
    if layer not in found.layers:
        raise QuantError(found.path, f"layer {layer!r} is quantized in a way that its tensors do not show")
    recipe = found.layers[layer].recipe
    return replace(recipe, full_precision=True) if recipe.format.startswith("float8") else recipe


def _names_for_saving(patcher: Any, keys: list[str]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """({key: name in a file}, {name: tensor that is in files only}), by asking the model to name placeholders."""
    placeholders = {key: torch.empty(0, device="meta") for key in keys}
    owners = {id(value): key for key, value in placeholders.items()}
    named: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    for name, value in _for_saving(patcher.model, placeholders).items():
        if id(value) in owners:
            named[owners[id(value)]] = name
        elif value.device.type != "meta":
            constants[name] = value
        else:
            raise FileError(
                type(patcher.model).__name__,
                f"this model rebuilds {name!r} when it is saved, which can't be done layer by layer; use ComfyUI's own "
                "save node",
            )
    return named, constants


def _for_saving(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What ComfyUI would write of a model with these weights, {key of the diffusion model: tensor}."""
    names = inspect.signature(model.state_dict_for_saving).parameters
    # Another pack's wrapper may take anything; ComfyUI 0.8 has no get_dtype_inference.
    hidden = "clip_state_dict" not in names and hasattr(model, "get_dtype_inference")
    if "unet_state_dict" in names or hidden:
        return model.state_dict_for_saving(dict(weights))
    module = model.diffusion_model  # ComfyUI 0.8 asks it itself
    module.state_dict = lambda: dict(weights)
    try:
        return model.state_dict_for_saving()
    finally:
        del module.state_dict


def _may_lose_prefix(names: set[str]) -> bool:
    """Without it, nothing may look like another prefix that ComfyUI would take off."""
    if not all(name.startswith(SAVED_PREFIX) for name in names):
        return False
    return not any(name.removeprefix(SAVED_PREFIX).startswith(("model.", "net.")) for name in names)


def source_file(patcher: Any) -> str | None:
    """The file that a model was loaded from, where ComfyUI remembers it (0.29 and later)."""
    init = getattr(patcher, "cached_patcher_init", None)
    first = init[1][0] if init and init[1] else None
    if isinstance(first, (list, tuple)):
        first = first[0] if len(first) == 1 else None
    return first if isinstance(first, str) else None


def header_of(patcher: Any) -> dict[str, str]:
    """The header's entries of that file, {} when it can't be read any more."""
    from ..files.header import read_header

    path = source_file(patcher)
    if path is None:
        return {}
    try:
        return dict(read_header(path).metadata)
    except (FileError, OSError) as error:
        log.info("NativeDiT: the header of the model's file is not carried over: %s", error)
        return {}


def not_in_weights(patcher: Any) -> list[str]:
    """What changes this model's output without being in its weights or patches: it can't be baked."""
    found = []
    if getattr(patcher, "weight_wrapper_patches", None):
        found.append("weight wrappers")
    if getattr(patcher, "injections", None):
        found.append("injected layers (a bypass LoRA, for example)")
    if getattr(patcher, "hook_patches", None):
        found.append("weight hooks")
    return found
