"""The part of the engine's Host that quantizes, saves, inspects and compares models."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..checkpoints import transform
from ..checkpoints.calibrations import calibration_file, list_calibrations
from ..checkpoints.comparison import compare
from ..checkpoints.folders import state_of
from ..checkpoints.inspection import inspect_layers
from ..checkpoints.load import load_diffusion_model
from ..checkpoints.opened import Checkpoint, open_checkpoint
from ..checkpoints.picture import picture_of_comparison, picture_of_file
from ..checkpoints.quant_report import report_data, report_text
from ..checkpoints.report_picture import picture_of_report
from ..files.dtypes import FLOAT_NAMES, torch_dtype
from ..files.errors import FileError
from ..files.memory import Lazy, TensorSource
from ..files.source import Source, open_source
from ..host import (
    AS_STORED,
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
    Saved,
)
from ..ldm.layers.operations import CastOps
from ..quant.calibration import Watcher, write_calibration
from ..quant.craft import PLAIN, Craft
from ..quant.markers import HEADER_KEY, MARKER, RECORD_KEY
from ..quant.ops import ComfyUIOps
from ..quant.repair import repair
from ..quant.transform import Wish, any_format
from ..supported_models import Match
from .clip import Clip
from .drawn_text import rasterise
from .objects import VAE, Model
from .pictures import NumberedFiles, expand_prefix
from .progress import Bar

__all__ = ["ModelFiles", "quantized_source"]

_OF_THE_FILE = {HEADER_KEY, RECORD_KEY, "prompt", "workflow", "modelspec.date", "modelspec.title"}


def quantized_source(
    checkpoint: Checkpoint, match: Match, precision: str, bar: Bar, options: Mapping[str, Any]
) -> TensorSource:
    """A file's tensors in memory, quantized on the way; options: of `transform.plan`. Raises FileError, QuantError,
    ValueError."""
    source = transform.comfy_layout(checkpoint, match)
    if source is checkpoint.source:
        source = source.only(lambda key: key.startswith(match.prefix))
    wanted = None if precision == AS_STORED else precision
    plan = transform.plan(source, wanted, progress=_to(bar), **options)
    tensors = plan.tensors(_to(bar))
    made = TensorSource(checkpoint.path, tensors, source.metadata)
    made.config = checkpoint.source.config
    return made


class ModelFiles:
    """Mixed into EngineHost."""

    folders: Any
    output_dir: Path
    device: torch.device
    progress: Any

    def policy_of(self, policy: str) -> str:
        return policy if policy in (CARD, GENERIC) else str(self.folders.path(POLICY_FOLDER, policy))

    def craft_of(self, calibration: str, rounding: str, smooth: bool) -> Craft:
        path = None if calibration == NO_STATISTICS else calibration_file(self.output_dir, calibration)
        return Craft.of(path, rounding, smooth)

    def list_statistics(self) -> list[str]:
        return list_calibrations(self.output_dir, STATISTICS_FOLDER)

    def fingerprint_rules(self, policy: str, calibration: str) -> str:
        states = []
        with suppress(OSError, ValueError):
            states.append(state_of(Path(self.policy_of(policy))))
        with suppress(FileError):
            states.append(state_of(calibration_file(self.output_dir, calibration)))
        return " ".join(states)

    def quantize_model(self, model: Model, *, precision: str, policy: str = CARD, keep: Sequence[str] = ()) -> Model:
        return self.quantize_with_report(model, precision=precision, policy=policy, keep=keep).model

    def quantize_with_report(
        self,
        model: Model,
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
        source = self._weights(model)
        budget = Wish.of(target_size, min_sqnr)
        with self._bar(source, f"quantize {model.file}") as bar:
            plan = transform.plan(
                source,
                any_format(precision, budget),
                policy=self.policy_of(policy),
                exclude=keep,
                budget=budget,
                progress=_to(bar),
                craft=self.craft_of(calibration, rounding, smooth),
            )
            tensors = plan.tensors(_to(bar))
        module = load_diffusion_model(
            TensorSource(source.path, tensors, source.metadata),
            architecture=model.architecture.name,
            device=self.device,
            operations=CastOps,
            quantized_operations=ComfyUIOps,
        )
        data = report_data(plan.report)
        report = Pictured(report_text(plan.report), _image(picture_of_report(data, rasterise)))
        return Quantized(replace(model, module=module), report)

    def calibrate_model(
        self,
        model: Model,
        positive: Any,
        negative: Any,
        latent: dict[str, Any],
        *,
        prefix: str,
        graph: Graph,
        **options,
    ) -> Saved:
        with Watcher().on(model.module) as watcher:
            settings = self.sample(model, positive, negative, latent, graph=graph, **PUBLISHED, **options).settings
        calibration = watcher.calibration(model=Path(model.file).name, settings=settings.text)
        path, shown = self._new_file(prefix, graph.prompt)
        write_calibration(calibration, path)
        return Saved(str(path), f"{path.name}: {len(calibration.layers)} layers", shown)

    def save_diffusion_model(
        self,
        model: Model,
        *,
        prefix: str,
        precision: str = AS_STORED,
        policy: str = CARD,
        calibration: str = NO_STATISTICS,
        rounding: str = PLAIN_ROUNDING,
        smooth: bool = False,
        graph: Graph,
    ) -> Saved:
        craft = self.craft_of(calibration, rounding, smooth)
        return self._save(self._weights(model), prefix, precision, policy, graph, model.architecture.name, craft)

    def save_text_encoder(
        self, clip: Clip, *, prefix: str, precision: str = AS_STORED, policy: str = CARD, graph: Graph
    ) -> list[Saved]:
        encoder = clip.encoder
        tensors = {**encoder.model.state_dict(), **encoder.tokenizer.state_tensors()}
        kept = _header(encoder.path)
        return [
            self._save(TensorSource(encoder.path, tensors, kept), prefix, precision, policy, graph, encoder.family.name)
        ]

    def save_vae(self, vae: VAE, *, prefix: str, precision: str = AS_STORED, graph: Graph) -> Saved:
        # No node of the engine changes a VAE, so its file is what is saved.
        if vae.name not in self.folders.files("vae"):
            raise FileError(vae.name, "is no file in models/vae: there is nothing to save")
        with open_source(self.folders.path("vae", vae.name), component="vae") as source:
            return self._save(source, prefix, precision, CARD, graph, "vae")

    def inspect_checkpoint(self, file: str) -> Pictured:
        with open_checkpoint(self._file(file)) as checkpoint:
            found = inspect_layers(checkpoint)
        return Pictured(found.text(), _image(picture_of_file(found, rasterise)))

    def repair_checkpoint(self, file: str, *, prefix: str, original: str | None = None) -> Saved:
        path, shown = self._new_file(prefix, None)
        given = None if original is None else self._file(original)
        report = repair(self._file(file), path, original=given)
        return Saved(str(path), "\n".join(report.warnings) or "it was in order already", shown)

    def compare_models(self, reference: Model, model: Model) -> Pictured:
        first, second = self._weights(reference), self._weights(model)
        with self._bar(first, "compare") as bar:
            found = compare(first, second, _to(bar))
        return Pictured(found.text(), _image(picture_of_comparison(found, rasterise)))

    def _diffusion_file(self, file: str) -> Path:
        """As the loader's node lists it: a name in diffusion_models, or "checkpoints/NAME"."""
        inside = file.removeprefix("checkpoints/")
        if inside != file and file not in self.folders.files("diffusion_models"):
            return self.folders.path("checkpoints", inside)
        return self.folders.path("diffusion_models", file)

    def _file(self, name: str) -> Path:
        folder, _, file = name.partition("/")
        return self.folders.path(folder, file)

    def _bar(self, source: Source, title: str) -> Any:
        return self.progress.bar(sum(info.nbytes for info in source.tensors.values()), title, unit="B")

    def _new_file(
        self, prefix: str, prompt: Mapping[str, Any] | None, suffix: str = ".safetensors"
    ) -> tuple[Path, dict[str, str]]:
        expanded = expand_prefix(prefix, width=0, height=0, prompt=prompt)
        files = NumberedFiles(self.output_dir, expanded, suffix=suffix)
        path = files.target.with_name(f"{files.target.name}_{files.counter:05}_{suffix}")
        subfolder = path.parent.relative_to(files.base).as_posix()
        return path, {"filename": path.name, "subfolder": "" if subfolder == "." else subfolder, "type": "output"}

    def _save(
        self,
        source: Source,
        prefix: str,
        precision: str,
        policy: str,
        graph: Graph,
        architecture: str,
        craft: Craft = PLAIN,
    ) -> Saved:
        path, shown = self._new_file(prefix, graph.prompt)
        wanted = None if precision == AS_STORED else precision
        plan = transform.plan(source, wanted, policy=self.policy_of(policy), craft=craft)
        metadata = {key: value for key, value in source.metadata.items() if key not in _OF_THE_FILE}
        metadata |= {
            "format": "pt",
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.title": path.stem,
            "modelspec.date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        metadata.setdefault("modelspec.architecture", architecture)
        if graph.prompt is not None:
            metadata["prompt"] = json.dumps(graph.prompt)
        metadata |= {key: json.dumps(value) for key, value in (graph.extra or {}).items()}
        with self._bar(source, f"save {path.name}") as bar:
            plan.write(path, metadata, _to(bar))
        text = "\n".join([f"{path.name}: {len(plan.assembly.entries)} tensors", *plan.report.warnings])
        return Saved(str(path), text, shown)

    def _weights(self, model: Model) -> TensorSource:
        """The module's weights in the dtypes that its file has: the engine may have widened them to compute."""
        file = model.file
        header = {"config": json.dumps({"transformer": _plain(getattr(model.module, "loaded_config", {}))})}
        stored: dict[str, str] = {}
        common = None
        if file in self.folders.files("diffusion_models"):
            with open_source(self.folders.path("diffusion_models", file), component="transformer") as source:
                stored = {key: info.dtype for key, info in source.tensors.items()}
                header = {**source.metadata, **header}
            floats = [dtype for dtype in stored.values() if dtype in FLOAT_NAMES]
            common = max(set(floats), key=floats.count) if floats else None
        header.pop(RECORD_KEY, None)
        state = model.module.state_dict()
        quantized = {key.removesuffix(MARKER) for key in state if key.endswith(f".{MARKER}")}
        tensors = {
            key: value if key.rpartition(".")[0] + "." in quantized else _narrowed(value, stored.get(key, common))
            for key, value in state.items()
        }
        return TensorSource(file, tensors, header)


def _to(bar: Bar) -> Callable[[int, int, str], None]:
    return lambda done, total, _: bar.to(done, total)


def _narrowed(value: torch.Tensor, stored: str | None) -> torch.Tensor | Lazy:
    if value.dtype != torch.float32 or stored not in ("BF16", "F16"):
        return value
    dtype = torch_dtype(stored)
    return Lazy(dtype, tuple(value.shape), lambda: value.to(dtype))


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}


def _header(path: str) -> dict[str, str]:
    if not Path(path).exists():
        return {}
    with open_source(path, component="text_encoder") as source:
        return dict(source.metadata)


def _image(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).unsqueeze(0)
