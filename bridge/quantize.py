"""Quantizing inside ComfyUI: a file while it is loaded, or a MODEL of the graph. Core's own loader does the rest.

What reaches the loader is a state dict as a quantized file would give it, so that core's layers, LoRA handling and
memory management apply unchanged.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.quant_ops
import comfy.sd
import folder_paths
import torch

from ..checkpoints import transform
from ..checkpoints.calibrations import calibration_file
from ..checkpoints.kinds import CHECKPOINT, DIFFUSION_MODEL, Kind, kind_of, wrong_slot
from ..checkpoints.opened import Checkpoint, checkpoint_of
from ..files.errors import FileError
from ..files.source import Source, open_source
from ..host import NO_STATISTICS
from ..quant.craft import PLAIN, Craft
from ..quant.formats import FORMATS, Recipe, parse_recipe
from ..quant.limits import Limits
from ..quant.markers import HEADER_KEY, RECORD_KEY
from ..quant.policy import read_policy
from ..quant.report import QuantizationReport
from ..quant.transform import Wish
from ..supported_models import Match, Shapes, find_architecture
from . import detection
from .config import constructor_arguments, lost_by_shapes
from .hooks import MARK, comfyui_version, loading
from .model import NativeDiTModel
from .progress import node_progress
from .quantized import applies_input_factors, undo_unheld, unheld_layers
from .weights import SAVED_PREFIX, diffusion_weights, source_file

log = logging.getLogger(__name__)

POLICY_FOLDER = "quantization_policies"
# Tensors beside the model's own in an all-in-one file that say how it is sampled ("v_pred", "ztsnr").
_NOTE_ELEMENTS = 16


def policy_of(name: str) -> str:
    """The node's choice: "card", "generic", or the path of a file in models/quantization_policies."""
    if name in (transform.CARD, transform.GENERIC):
        return name
    return folder_paths.get_full_path_or_raise(POLICY_FOLDER, name)


def budget_of(target_size: float, min_sqnr: float) -> Wish:
    """The node's budget (GB, decibels, 0 = none), among formats that ComfyUI holds here and the device is fast at."""
    device = comfy.model_management.get_torch_device()
    kind = device.type if device.type == "mps" else ""
    if device.type == "cuda" and torch.version.hip is None:
        kind = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    return Wish.of(target_size, min_sqnr, Limits(kind, (), frozenset(comfy.quant_ops.QUANT_ALGOS)))


def craft_of(calibration: str, rounding: str, smooth: bool) -> Craft:
    """The node's choices; calibration: a file in the output folder, or "none". Raises FileError, ValueError."""
    if smooth and not applies_input_factors():
        raise ValueError(
            f"ComfyUI {comfyui_version()} does not apply the factors that smoothing needs (0.30 and newer do): switch "
            "smooth off"
        )
    output = folder_paths.get_output_directory()
    path = None if calibration == NO_STATISTICS else calibration_file(output, calibration)
    return Craft.of(path, rounding, smooth)


def refuse_unheld(what: str, precision: str | None, policy: str) -> None:
    """Raises FileError for a format that this ComfyUI, or the device, can't hold."""
    recipes: list[Recipe] = [] if precision is None else [parse_recipe(precision)]
    if policy not in (transform.CARD, transform.GENERIC):
        recipes += [rule.recipe for rule in read_policy(policy).rules if rule.recipe is not None]
    for name in dict.fromkeys(recipe.format for recipe in recipes):
        if name not in comfy.quant_ops.QUANT_ALGOS:
            raise FileError(
                what,
                f"can't be quantized to {name}: ComfyUI {comfyui_version()} does not hold it, it needs "
                f"{FORMATS[name].since['linear']} or newer with its comfy-kitchen; choose another format",
            )
        device = comfy.model_management.get_torch_device()
        if device.type == "mps" and name in ("float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4"):
            problem = f"can't be quantized to {name}: Apple's GPUs have no 8-bit floats; choose an int8 format"
            raise FileError(what, problem)


def compute_device() -> torch.device:
    """Where weights are quantized: a CUDA device if ComfyUI uses one."""
    device = comfy.model_management.get_torch_device()
    return device if device.type == "cuda" else torch.device("cpu")


class DetectedAs:
    """What our cards and ComfyUI's own detection make of shapes; two equal answers are the same model.

    A quantization may ask hundreds of times: the card that knows the first shapes is the only one asked later."""

    def __init__(self) -> None:
        self._match: Match | None = None
        self._asked = False

    def __call__(self, shapes: Shapes) -> tuple[Any, str]:
        if not self._asked:
            self._match, self._asked = find_architecture(shapes), True
        own = None
        if self._match is not None:
            found = self._match.architecture.match(shapes, self._match.prefix)
            own = None if found is None else (found.layout and found.layout.name, found.config)
        return own, cores_verdict(shapes)


@functools.lru_cache(maxsize=4096)
def _placeholder(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def cores_verdict(shapes: Shapes) -> str:
    """The configuration that ComfyUI itself finds, as text; what it raises, where it does."""
    originals = vars(comfy.model_detection).get(MARK, {})
    detect = originals.get("detect_unet_config", comfy.model_detection.detect_unet_config)
    tensors = {key: _placeholder(tuple(shape)) for key, shape in shapes.items()}
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    try:
        config = detect(own or tensors, "")
    except Exception as error:  # a foreign function on a file it may not know
        return f"raises {type(error).__name__}"
    return repr(sorted((config or {}).items(), key=lambda item: item[0]))


def load_quantized(
    path: str,
    architecture: str | None,
    precision: str | None,
    policy: str,
    budget: Wish | None = None,
    craft: Craft = PLAIN,
    disable_dynamic: bool = False,
) -> Any:
    """A model from a file, its weights quantized on the way; precision None keeps them as stored, but in ComfyUI's
    dialect, and with a budget they may get any format.

    Holds the result and some pieces of the file, never both models. Raises FileError, QuantError and ValueError.
    """
    budget = budget or Wish()
    as_stored = precision is None and not budget.given and craft == PLAIN
    if not as_stored:
        transform.refuse_idle(precision, budget, craft)
        refuse_unheld(path, precision, policy)
    with open_source(path) as source:
        checkpoint = checkpoint_of(source)
        match = find_architecture(checkpoint.shapes, metadata=checkpoint.metadata, architecture=architecture)
        kind = kind_of(checkpoint.shapes)
        if match is None and kind not in (DIFFUSION_MODEL, CHECKPOINT):
            raise FileError(path, wrong_slot(kind, DIFFUSION_MODEL))
        if not as_stored:
            _refuse_quantized(checkpoint, precision or "what fits the budget")
        whole = kind is CHECKPOINT
        model = _model_part(checkpoint, match, kind)
        progress = node_progress()
        options = {"policy": policy, "device": compute_device(), "detect": DetectedAs(), "craft": craft}
        plan = transform.plan(model, precision, budget=budget, progress=progress, **options)
        tensors = plan.tensors(progress)
        for warning in plan.report.warnings:
            log.warning("NativeDiT: %s: %s", path, warning)
        if as_stored:
            undo_unheld(tensors, source, checkpoint.quantized.layers)
        if whole:
            tensors.update(_notes(source))
        metadata = {key: value for key, value in model.metadata.items() if key not in (HEADER_KEY, RECORD_KEY)}
    patcher = hand_over(path, tensors, metadata, architecture, whole=whole, disable_dynamic=disable_dynamic)
    patcher.cached_patcher_init = (load_quantized, (path, architecture, precision, policy, budget, craft))
    return patcher


def is_odd(checkpoint: Checkpoint) -> bool:
    """Whether a file holds quantized layers, or stray float8 tensors, that ComfyUI's own loader would misread."""
    found = checkpoint.quantized
    stray = (
        info.dtype.startswith("F8_E")
        and (len(info.shape) < 2 or not key.endswith((".weight", "_scale", ".weight_s_rel")))
        for key, info in checkpoint.source.tensors.items()
    )
    settled = (bool(layer.notes) or layer.dialect == "scales" for layer in found.layers.values())
    return bool(found.problems or found.conflicts or unheld_layers(found.layers)) or any(settled) or any(stray)


def _refuse_quantized(checkpoint: Checkpoint, precision: str) -> None:
    layers = [layer for layer in checkpoint.quantized.layers.values() if layer.dialect != "cast"]
    if layers:
        raise FileError(
            checkpoint.path,
            f"is quantized already ({len(layers)} layers, {layers[0].name!r} as {layers[0].recipe}); load it as "
            f"stored, or start from the unquantized model to get {precision}",
        )


def _model_part(checkpoint: Checkpoint, match: Match | None, kind: Kind) -> Source:
    if kind is CHECKPOINT:
        return checkpoint.source.only(lambda key: key.startswith(SAVED_PREFIX))
    return transform.comfy_layout(checkpoint, match)


def _notes(source: Source) -> dict[str, torch.Tensor]:
    small = [key for key, info in source.tensors.items() if "." not in key and info.numel <= _NOTE_ELEMENTS]
    return {key: source.read(key) for key in small}


def hand_over(
    path: str,
    tensors: dict[str, torch.Tensor],
    metadata: Mapping[str, str],
    architecture: str | None = None,
    *,
    whole: bool = False,
    disable_dynamic: bool = False,
) -> Any:
    """ComfyUI's ModelPatcher of a state dict, by its own loader. whole: the state dict is that of a checkpoint."""
    later = {"disable_dynamic": True} if disable_dynamic else {}
    with loading(path), detection.only(architecture):
        if whole:
            parts = {"output_vae": False, "output_clip": False, "output_model": True}
            found = comfy.sd.load_state_dict_guess_config(tensors, **parts, metadata=dict(metadata), **later)
            patcher = None if found is None else found[0]
        else:
            patcher = comfy.sd.load_diffusion_model_state_dict(tensors, metadata=dict(metadata), **later)
    if patcher is None:
        raise FileError(path, f"is a diffusion model that ComfyUI {comfyui_version()} does not recognise")
    return patcher


def quantize_reporting(
    patcher: Any,
    precision: str | None,
    policy: str,
    keep: Iterable[str] = (),
    budget: Wish | None = None,
    craft: Craft = PLAIN,
) -> tuple[Any, QuantizationReport]:
    """A MODEL like this one with quantized weights: its patches are baked layer by layer, everything else (hooks,
    injected layers, options) goes along.

    ``patcher`` and its weights stay as they are. Raises FileError, QuantError, ValueError.
    """
    title = f"the {type(patcher.model).__name__} model in the graph"
    refuse_unheld(title, precision, policy)
    with patcher.use_ejected():
        weights, progress = diffusion_weights(patcher, title), node_progress()
        plan = transform.plan(
            weights.source,
            precision,
            policy=policy,
            exclude=keep,
            requantize=weights.requantize,
            device=compute_device(),
            detect=DetectedAs(),
            budget=budget,
            progress=progress,
            craft=craft,
        )
        tensors = plan.tensors(progress)
    if misfits := weights.baking.summary():
        log.warning("NativeDiT: quantized with what fits: %s", misfits)
    new = hand_over(title, tensors, {})
    _refuse_another_model(title, patcher, new)
    return _with_model(patcher, new), plan.report


def _refuse_another_model(title: str, old: Any, new: Any) -> None:
    def known(patcher: Any) -> dict[str, Any]:
        return {key: value for key, value in patcher.model.model_config.unet_config.items() if key != "dtype"}

    if type(new.model) is not type(old.model) or not _mean_the_same(old.model.model_config, known(old), known(new)):
        raise FileError(
            title,
            f"is recognised as {type(new.model).__name__} with other settings when its weights are loaded again; "
            "ComfyUI can't tell this model by its weights, so it can't be quantized in the graph",
        )


def _mean_the_same(model_config: Any, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether ComfyUI's settings are equal; of a model of ours, what they say may be spelled out or be the default."""
    card = getattr(model_config, "card", None)
    if old == new or card is None:
        return old == new
    old, new = constructor_arguments(card, old), constructor_arguments(card, new)
    return not lost_by_shapes(card, old, new) and not lost_by_shapes(card, new, old)


def _with_model(old: Any, new: Any) -> Any:
    """A clone of ``old`` (options, hooks, sampling) around the model of ``new``."""
    _as_before(old, new)
    if "model_override" in inspect.signature(old.clone).parameters:
        clone = old.clone(model_override=new.get_clone_model_override())
    else:  # ComfyUI 0.8
        clone = old.clone()
        clone.model, clone.backup, clone.object_patches_backup, clone.pinned = new.model, {}, {}, set()
    clone.hook_backup = {}
    clone.size = new.model_size()
    clone.patches, clone.patches_uuid, clone.parent = {}, uuid.uuid4(), None
    clone.cached_patcher_init = (_once_more, (source_file(old), new))
    return clone


def _once_more(file: str | None, patcher: Any, disable_dynamic: bool = False) -> Any:
    """The same MODEL with weights of its own, for nodes that want a copy on another device. Made from the quantized
    weights alone: whatever they were made from need not stay in memory. ``file`` is where a model's file is looked for.
    """
    title = f"the {type(patcher.model).__name__} model in the graph"
    with patcher.use_ejected():
        tensors = transform.plan(diffusion_weights(patcher, title).source, None).tensors()
    copied = hand_over(title, tensors, {}, disable_dynamic=disable_dynamic)
    _as_before(patcher, copied)
    return copied


def _as_before(old: Any, new: Any) -> None:
    """What is known of a model beside its weights: how it is sampled, and the file whose name says which variant."""
    sampling = old.object_patches_backup.get("model_sampling", old.model.model_sampling)
    new.model.model_type = old.model.model_type
    new.model.model_sampling = copy.deepcopy(sampling)
    if isinstance(new.model, NativeDiTModel):
        new.model.nativedit_file = old.model.nativedit_file
