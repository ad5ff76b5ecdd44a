"""ComfyUI as the Host of our nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch

from ..checkpoints import load as checkpoints
from ..checkpoints.calibrations import list_calibrations
from ..checkpoints.kinds import CHECKPOINT, DIFFUSION_MODEL, TEXT_ENCODER, kind_of, wrong_slot
from ..checkpoints.opened import open_checkpoint
from ..files.dtypes import parse_dtype
from ..files.errors import FileError
from ..host import (
    AS_STORED,
    AUTO,
    CARD,
    GENERIC,
    NO_STATISTICS,
    PLAIN_ROUNDING,
    POLICY_FOLDER,
    PUBLISHED,
    STATISTICS_FOLDER,
    Graph,
    Pictured,
    Quantized,
    Sampled,
    Saved,
)
from ..quant.craft import PLAIN
from ..quant.formats import is_format
from ..quant.reader import canonical_state_dict
from ..quant.transform import any_format
from . import calibrate, convert, detection, patch_guidance, quantize, reports, sample, save, text_encoders, vae
from .auto_files import auto_path, wants_pixels
from .clip import PromptTokenizer
from .hooks import loading
from .model import NativeDiTModel
from .quantized import undo_unheld, unknown_format

# How the loader's node lists the files of models/checkpoints.
CHECKPOINTS = "checkpoints/"


class ComfyUIHost:
    """See ``host.Host``: models, encoders and latents are those of ComfyUI itself."""

    name = "ComfyUI"

    def list_files(self, folder: str) -> list[str]:
        return folder_paths.get_filename_list(folder)

    def list_statistics(self) -> list[str]:
        return list_calibrations(folder_paths.get_output_directory(), STATISTICS_FOLDER)

    def fingerprint_rules(self, policy: str, calibration: str) -> str:
        states = [] if policy in (CARD, GENERIC) else [_state_of(folder_paths.get_full_path(POLICY_FOLDER, policy))]
        if calibration != NO_STATISTICS:
            states.append(_state_of(os.path.join(folder_paths.get_output_directory(), calibration)))
        return " ".join(states)

    def list_model_folders(self) -> list[str]:
        return convert.list_model_folders()

    def fingerprint_source(self, source: str) -> str:
        return convert.fingerprint_source(source)

    def fingerprint(self, folder: str, file: str, policy: str = CARD, architecture: str = AUTO) -> str:
        return f"{_state_of(_known_path(folder, file, architecture))} {self.fingerprint_rules(policy, NO_STATISTICS)}"

    def load_diffusion_model(
        self,
        file: str,
        *,
        architecture: str = AUTO,
        precision: str = AS_STORED,
        policy: str = CARD,
        target_size: float = 0.0,
        min_sqnr: float = 0.0,
        calibration: str = NO_STATISTICS,
        rounding: str = PLAIN_ROUNDING,
        smooth: bool = False,
    ) -> Any:
        path = auto_path("diffusion_models", architecture) if file == AUTO else diffusion_model_path(file)
        if path is None:
            path = folder_paths.get_full_path_or_raise("diffusion_models", file)
        wanted = None if architecture == AUTO else architecture
        budget = quantize.budget_of(target_size, min_sqnr)
        craft = quantize.craft_of(calibration, rounding, smooth)
        if is_format(precision) or budget.given or craft != PLAIN:
            chosen = None if precision == AS_STORED else precision
            return quantize.load_quantized(path, wanted, chosen, quantize.policy_of(policy), budget, craft)
        model = load_diffusion_model(path, wanted, _dtype(precision))
        model.cached_patcher_init = (load_diffusion_model, (path, wanted, _dtype(precision)))
        return model

    def load_text_encoder(self, file: str, *, architecture: str = AUTO, precision: str = AS_STORED) -> Any:
        path = _path("text_encoders", file, architecture)
        wanted = None if architecture == AUTO else architecture
        clip = load_clip(path, wanted, _dtype(precision))
        clip.patcher.cached_patcher_init = (_load_clip_patcher, (path, wanted, _dtype(precision)))
        return clip

    def encode_negative_prompt(self, clip: Any, text: str) -> Any:
        options = {"negative": True} if isinstance(clip.tokenizer, PromptTokenizer) else {}
        return clip.encode_from_tokens_scheduled(clip.tokenize(text, **options))

    def load_vae(self, file: str, *, precision: str = AUTO, architecture: str = AUTO) -> Any:
        pixels = file == vae.PIXEL_SPACE or (file == AUTO and wants_pixels(architecture))
        path = None if pixels else _path("vae", file, architecture)
        return vae.load_vae(path, None if precision == AUTO else parse_dtype(precision))

    def empty_latent(self, model: Any, *, width: int, height: int, batch_size: int) -> dict[str, Any]:
        latent = model.get_model_object("latent_format")
        compression = getattr(latent, "spacial_downscale_ratio", 8)  # ComfyUI 0.8 has no such attribute
        unit, size = compression, {"width": width, "height": height}
        if isinstance(model.model, NativeDiTModel):
            card = model.model.model_config.card
            unit *= getattr(model.model.diffusion_model, "patch_size", 1)
            if card.defaults is not None:
                size = {"width": width or card.defaults.width, "height": height or card.defaults.height}
        for name, value in size.items():
            if value <= 0 or value % unit:
                near = max(unit, round(value / unit) * unit)
                raise ValueError(f"{name} {value} is not a multiple of {unit}, which this model needs; {near} is near")
        shape = [batch_size, latent.latent_channels, size["height"] // compression, size["width"] // compression]
        if latent.latent_dimensions == 3:
            shape.insert(2, 1)
        samples = torch.zeros(shape, device=comfy.model_management.intermediate_device())
        return {"samples": samples, "downscale_ratio_spacial": compression}

    def samplers(self) -> list[str]:
        return sample.samplers()

    def schedulers(self) -> list[str]:
        return sample.schedulers()

    def sample(self, model: Any, positive: Any, negative: Any, latent: dict[str, Any], **settings: Any) -> Sampled:
        return sample.sample(model, positive, negative, latent, **settings)

    def set_model_sampling(self, model: Any, *, shift: float = 0.0, latent: dict[str, Any] | None = None) -> Any:
        return sample.set_model_sampling(model, shift, latent)

    def set_conditions(self, conditioning: Any, values: Mapping[str, Any]) -> Any:
        return sample.set_conditions(conditioning, values)

    def set_adaptive_projected_guidance(self, model: Any, *, limit: float) -> Any:
        return sample.set_adaptive_projected_guidance(model, limit)

    def set_patch_renormalized_guidance(self, model: Any, *, patch_size: int) -> Any:
        return patch_guidance.set_patch_renormalized_guidance(model, patch_size)

    def quantize_model(self, model: Any, *, precision: str, policy: str = CARD, keep: Sequence[str] = ()) -> Any:
        return quantize.quantize_reporting(model, precision, quantize.policy_of(policy), keep)[0]

    def quantize_with_report(
        self,
        model: Any,
        *,
        precision: str,
        policy: str = CARD,
        keep: Sequence[str] = (),
        target_size: float = 0.0,
        min_sqnr: float = 0.0,
        calibration: str = NO_STATISTICS,
        rounding: str = PLAIN_ROUNDING,
        smooth: bool = False,
    ) -> Quantized:
        budget = quantize.budget_of(target_size, min_sqnr)
        wanted = any_format(precision, budget)
        options = (quantize.policy_of(policy), keep, budget, quantize.craft_of(calibration, rounding, smooth))
        made, report = quantize.quantize_reporting(model, wanted, *options)
        return Quantized(made, reports.quantization_report(report))

    def calibrate_model(
        self, model: Any, positive: Any, negative: Any, latent: dict[str, Any], *, prefix: str, **options: Any
    ) -> Saved:
        def sampled() -> Sampled:
            return self.sample(model, positive, negative, latent, **PUBLISHED, **options)

        return calibrate.calibrate(model, sampled, prefix)

    def save_diffusion_model(
        self,
        model: Any,
        *,
        prefix: str,
        precision: str = AS_STORED,
        policy: str = CARD,
        calibration: str = NO_STATISTICS,
        rounding: str = PLAIN_ROUNDING,
        smooth: bool = False,
        graph: Graph,
    ) -> Saved:
        craft = quantize.craft_of(calibration, rounding, smooth)
        return save.save_diffusion_model(model, prefix, precision, policy, graph, craft)

    def save_text_encoder(
        self, clip: Any, *, prefix: str, precision: str = AS_STORED, policy: str = CARD, graph: Graph
    ) -> list[Saved]:
        return save.save_text_encoder(clip, prefix, precision, policy, graph)

    def save_vae(self, vae: Any, *, prefix: str, precision: str = AS_STORED, graph: Graph) -> Saved:
        return save.save_vae(vae, prefix, precision, graph)

    def inspect_checkpoint(self, file: str) -> Pictured:
        return reports.inspect_checkpoint(file)

    def repair_checkpoint(self, file: str, *, prefix: str, original: str | None = None) -> Saved:
        return reports.repair_checkpoint(file, prefix, original)

    def convert_checkpoint(
        self, source: str, *, prefix: str, layout: str = "comfy", component: str = AUTO, architecture: str = AUTO
    ) -> Saved:
        return convert.convert_checkpoint(source, prefix, layout, component, architecture)

    def compare_models(self, reference: Any, model: Any) -> Pictured:
        return reports.compare_models(reference, model)


def diffusion_model_path(file: str) -> str | None:
    """Of a name as the loader's node lists it: one in diffusion_models, or "checkpoints/NAME"."""
    path = folder_paths.get_full_path("diffusion_models", file)
    if path is None and file.startswith(CHECKPOINTS):
        path = folder_paths.get_full_path("checkpoints", file.removeprefix(CHECKPOINTS))
    return path


def _path(folder: str, file: str, architecture: str) -> str:
    return auto_path(folder, architecture) if file == AUTO else folder_paths.get_full_path_or_raise(folder, file)


def _known_path(folder: str, file: str, architecture: str) -> str | None:
    """None for a file that is gone, or where "auto" finds none."""
    if file == AUTO:
        try:
            return auto_path(folder, architecture)
        except ValueError:
            return None
    return diffusion_model_path(file) if folder == "diffusion_models" else folder_paths.get_full_path(folder, file)


def _state_of(path: str | None) -> str:
    if path is None or not os.path.isfile(path):
        return "missing"
    state = os.stat(path)
    return f"{path}:{state.st_size}:{state.st_mtime_ns}"


def _dtype(precision: str) -> torch.dtype | None:
    return None if precision == AS_STORED else parse_dtype(precision)


def load_diffusion_model(
    path: str, architecture: str | None, dtype: torch.dtype | None, disable_dynamic: bool = False
) -> Any:
    """ComfyUI's ModelPatcher of a file, ours or core's. Raises FileError that says what the file is instead."""
    with open_checkpoint(path) as checkpoint:
        try:
            checkpoints.recognise(checkpoint, architecture=architecture)
        except FileError:
            # A layout that no card knows may be one of ComfyUI's own.
            if architecture is not None or kind_of(checkpoint.shapes) not in (DIFFUSION_MODEL, CHECKPOINT):
                raise
        odd, all_in_one = quantize.is_odd(checkpoint), kind_of(checkpoint.shapes) is CHECKPOINT
    if odd and dtype is None:
        return quantize.load_quantized(path, architecture, None, CARD, disable_dynamic=disable_dynamic)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    later = {"disable_dynamic": True} if disable_dynamic else {}  # unknown to ComfyUI 0.8, which never asks for it
    with detection.only(architecture):
        if all_in_one:
            parts = {"output_vae": False, "output_clip": False}
            return comfy.sd.load_checkpoint_guess_config(path, **parts, model_options=options, **later)[0]
        return comfy.sd.load_diffusion_model(path, model_options=options, **later)


def load_clip(path: str, architecture: str | None, dtype: torch.dtype | None, disable_dynamic: bool = False) -> Any:
    """ComfyUI's CLIP of a text encoder's file. Raises FileError that says what the file is instead."""
    with open_checkpoint(path) as checkpoint:
        kind = kind_of(checkpoint.shapes)
        if kind is not TEXT_ENCODER:
            raise FileError(path, wrong_slot(kind, TEXT_ENCODER))
        if checkpoint.quantized.is_quantized:
            # Every dialect, not only those that ComfyUI's own converter knows.
            state_dict, metadata = canonical_state_dict(checkpoint.source), checkpoint.source.metadata
            undo_unheld(state_dict, checkpoint.source, checkpoint.quantized.layers)
        else:
            state_dict, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
    problem = unknown_format(state_dict)
    if problem is not None:
        raise FileError(path, problem)
    with loading(path):
        found = text_encoders.recognise(state_dict, metadata, architecture)
        if found is None:
            raise FileError(path, _no_use(architecture))
        return text_encoders.build_clip(
            state_dict,
            found,
            model_options={} if dtype is None else {"dtype": dtype},
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            **({"disable_dynamic": True} if disable_dynamic else {}),
        )


def _no_use(architecture: str | None) -> str:
    if architecture is None:
        return "is a text encoder that no model of NativeDiT uses; ComfyUI's own Load CLIP node may load it"
    return f"is not a text encoder that {architecture} uses"


def _load_clip_patcher(*args: Any, **kwargs: Any) -> Any:
    return load_clip(*args, **kwargs).patcher
