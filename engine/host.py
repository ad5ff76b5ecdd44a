"""The Host that runs without ComfyUI."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.autoencoder import load_autoencoder
from ..checkpoints.load import load_diffusion_model, load_text_encoder, recognise
from ..checkpoints.opened import open_checkpoint
from ..files.dtypes import parse_dtype
from ..files.errors import FileError
from ..host import AS_STORED, AUTO, CARD, GENERIC, NO_STATISTICS, PLAIN_ROUNDING, POLICY_FOLDER, Sampled
from ..latent_formats import get_latent_format
from ..ldm.layers.operations import CastOps
from ..quant.craft import PLAIN
from ..quant.formats import is_format
from ..quant.ops import ComfyUIOps
from ..quant.transform import Wish
from ..supported_models import Architecture, get_architecture, prompt_readers
from ..text_encoders.families import find_text_encoder
from . import patch_guidance, settings
from .auto_files import named
from .autoencoder import PIXEL_SPACE, NativeAutoencoder, PixelSpace
from .clip import Clip
from .convert_files import ConvertedFiles
from .flow import FlowSampling
from .lora import LoraFile, apply_lora, diffusion_names, text_encoder_names
from .model_files import quantized_source
from .model_folders import FileList, ModelFolders
from .objects import VAE, Condition, Model
from .progress import Progress
from .samplers import SAMPLERS
from .schedules import SCHEDULES
from .wan_vae import load_wan_autoencoder

__all__ = ["EngineHost"]


@dataclass
class EngineHost(ConvertedFiles):
    """One run's surroundings: where models are, where pictures go and come from, what computes."""

    folders: ModelFolders
    output_dir: Path
    input_dir: Path
    device: torch.device = field(default_factory=lambda: torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    progress: Progress = field(default_factory=Progress)
    name: str = "engine"

    def list_files(self, folder: str) -> FileList:
        return self.folders.list(folder)

    def path_of(self, picture: dict[str, str]) -> Path:
        """The file behind a node's description of a picture it saved."""
        folder = self.output_dir if picture["type"] == "output" else self.temp_dir
        return folder / picture["subfolder"] / picture["filename"]

    @property
    def temp_dir(self) -> Path:
        """Where previews go."""
        return self.output_dir / "temp"

    def fingerprint(self, folder: str, file: str, policy: str = CARD, architecture: str = AUTO) -> str:
        with suppress(ValueError):
            file = named(self.folders, folder, file, architecture)
        wanted = [(folder, file)] if policy in (CARD, GENERIC) else [(folder, file), (POLICY_FOLDER, policy)]
        states = []
        for kind, name in wanted:
            try:
                state = self.folders.path(kind, name).stat()
                states.append(f"{state.st_size}:{state.st_mtime_ns}")
            except (OSError, ValueError):
                states.append("missing")
        return " ".join(states)

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
    ) -> Model:
        file = named(self.folders, "diffusion_models", file, architecture)
        path = self._diffusion_file(file)
        wanted = None if architecture == AUTO else architecture
        with open_checkpoint(path, component="transformer") as checkpoint:
            match = recognise(checkpoint, architecture=wanted)
            card = match.architecture.of_config({**match.config, **(checkpoint.source.config or {})})
            nbytes = sum(info.nbytes for info in checkpoint.source.tensors.values())
        if card.module is None:
            problem = f"is {card.title}, which ComfyUI's core runs and the engine does not; run the workflow there"
            raise FileError(path, f"{problem} with --server URL")
        budget = Wish.of(target_size, min_sqnr)
        craft = self.craft_of(calibration, rounding, smooth)
        quantized = is_format(precision) or budget.given or craft != PLAIN
        dtype = self._storage(nbytes) if precision == AS_STORED else None if quantized else precision
        with self.progress.bar(nbytes, f"load {Path(file).name}", unit="B") as bar:
            weights: Any = path
            if quantized:
                with open_checkpoint(path, component="transformer") as checkpoint:
                    options = {"policy": self.policy_of(policy), "budget": budget, "craft": craft}
                    weights = quantized_source(checkpoint, match, precision, bar, options)
            module = load_diffusion_model(
                weights,
                architecture=card.name,
                dtype=dtype,
                device=self.device,
                operations=CastOps,
                quantized_operations=ComfyUIOps,
                progress=bar.to,
            )
        return Model(
            file=file,
            module=module,
            architecture=card,
            latent=get_latent_format(card.latent_format),
            sampling=FlowSampling.of_card(card.sampling),
            device=self.device,
            dtype=self.computation(card.dtypes),
        )

    def load_text_encoder(self, file: str, *, architecture: str = AUTO, precision: str = AS_STORED) -> Clip:
        file = named(self.folders, "text_encoders", file, architecture)
        path = self.folders.path("text_encoders", file)
        card, family = self._text_encoder_of(path, architecture)
        with self.progress.bar(path.stat().st_size if path.is_file() else 0, f"load {Path(file).name}", "B") as bar:
            encoder = load_text_encoder(
                path,
                family=family,
                dtype=None if precision == AS_STORED else precision,
                device=self.device,
                operations=CastOps,
                quantized_operations=ComfyUIOps,
                progress=bar.to,
            )
        return Clip(encoder, card, self.device, self.progress.note)

    def encode_negative_prompt(self, clip: Clip, text: str) -> list[Condition]:
        return [clip.encode(text, negative=True)]

    def load_vae(self, file: str, *, precision: str = AUTO, architecture: str = AUTO) -> VAE:
        """See `host.Host`. precision "auto" is float32."""
        file = named(self.folders, "vae", file, architecture)
        if file == PIXEL_SPACE:
            return PixelSpace()
        path = self.folders.path("vae", file)
        dtype = torch.float32 if precision == AUTO else parse_dtype(precision)
        wan = load_wan_autoencoder(path, device=self.device, dtype=dtype)
        if wan is not None:
            return wan
        module, kind = load_autoencoder(path, device=self.device, operations=CastOps)
        return NativeAutoencoder(file, module, kind.latent_channels, kind.compression, self.device, dtype)

    def apply_lora(
        self, model: Model, clip: Clip | None, file: str, strength_model: float, strength_clip: float
    ) -> tuple[Model, Clip | None]:
        """Both with the LoRA baked in; how much of it fitted is said. Raises FileError when most of it did not."""
        lora = LoraFile.read(self.folders.path("loras", file))
        for_text = lora.part(text_encoder=True)
        for_model = lora.layers.keys() - for_text
        if strength_model and for_model:
            layers = [name for name, _ in model.module.named_modules()]
            names = diffusion_names(layers, model.architecture.lora_prefixes)
            module, summary = apply_lora(model.module, lora, for_model, names, strength_model)
            self.progress.note(f"{model.architecture.title}: {summary}")
            model = replace(model, module=module)
        if clip is not None and strength_clip and for_text:
            layers = [name for name, _ in clip.encoder.model.named_modules()]
            names = text_encoder_names(layers, clip.encoder.family.name)
            module, summary = apply_lora(clip.encoder.model, lora, for_text, names, strength_clip)
            self.progress.note(f"text encoder: {summary}")
            clip = replace(clip, encoder=replace(clip.encoder, model=module))
        if lora.unread:
            self.progress.note(f"{file}: {len(lora.unread)} keys were not read, the first: {lora.unread[0]}")
        return model, clip

    def samplers(self) -> list[str]:
        return list(SAMPLERS)

    def schedulers(self) -> list[str]:
        return list(SCHEDULES)

    def sample(
        self, model: Model, positive: list[Condition], negative: list[Condition], latent: dict[str, Any], **options: Any
    ) -> Sampled:
        done = settings.sample(model, positive, negative, latent, **options)
        self.progress.note(f"sampled with {done.settings.text}")
        return done

    def set_model_sampling(self, model: Model, *, shift: float = 0.0, latent: dict[str, Any] | None = None) -> Model:
        return settings.set_model_sampling(model, shift, latent)

    def set_conditions(self, conditioning: list[Condition], values: Mapping[str, Any]) -> list[Condition]:
        return settings.set_conditions(conditioning, values)

    def set_adaptive_projected_guidance(self, model: Model, *, limit: float) -> Model:
        return settings.set_adaptive_projected_guidance(model, limit)

    def set_patch_renormalized_guidance(self, model: Model, *, patch_size: int) -> Model:
        return patch_guidance.set_patch_renormalized_guidance(model, patch_size)

    def empty_latent(self, model: Model, *, width: int, height: int, batch_size: int) -> dict[str, Any]:
        defaults, latent = model.architecture.defaults, model.latent
        if defaults is not None:
            width, height = width or defaults.width, height or defaults.height
        if not width or not height:
            raise ValueError(f"{model.architecture.title} has no size of its own; give width and height")
        check_size(model, width, height)
        size = (height // latent.compression, width // latent.compression)
        return {
            "samples": torch.zeros(batch_size, latent.channels, *size),
            "downscale_ratio_spacial": latent.compression,
        }

    def computation(self, safe: tuple[str, ...]) -> torch.dtype:
        """The dtype to compute in: float32 on a CPU, else the best of those that are safe for the model."""
        if self.device.type == "cpu":
            return torch.float32
        return parse_dtype(safe[0])

    def _storage(self, nbytes: int) -> torch.dtype | None:
        """Weights as stored (None), or widened once to what a CPU computes in when memory allows it: widening them at
        every use gives the same numbers and takes longer."""
        if self.device.type != "cpu" or 2 * nbytes > _free_memory() // 2:
            return None
        return torch.float32

    def _text_encoder_of(self, path: Path, architecture: str) -> tuple[Architecture, str]:
        """Whose prompts the file encodes, and which family it then is. Raises FileError, ValueError."""
        with open_checkpoint(path, component="text_encoder") as checkpoint:
            found = find_text_encoder(checkpoint.shapes, checkpoint.metadata)
            metadata = checkpoint.metadata
        families = [family.name for family, _, _ in found]
        if architecture != AUTO:
            card = get_architecture(architecture)
            fits = [name for name in families if name in card.text_encoders]
            # Where no family fits, loading says what the file is instead.
            return card, fits[0] if fits else card.text_encoders[0]
        for encoder, _, config in found:
            family = encoder.name
            readers = prompt_readers(family, config.get("hidden_size"), metadata)
            if len({card.prompt for card in readers}) > 1:
                names = ", ".join(card.name for card in readers)
                raise FileError(
                    path,
                    f"several models read this text encoder ({names}) and want their prompts differently; "
                    "load it with NativeDiTLoadTextEncoder and choose one as architecture",
                )
            if readers:
                return readers[0], family
        load_text_encoder(path)  # raises for a file that is no text encoder, and says what it is
        raise FileError(path, f"is a text encoder ({families[0]}) that no model of NativeDiT uses")


def check_size(model: Model, width: int, height: int) -> None:
    """Raises ValueError that names the nearest good sizes."""
    multiple = model.latent.compression * model.patch_size
    if width % multiple or height % multiple:
        good = [f"{_near(width, multiple, up)}x{_near(height, multiple, up)}" for up in (False, True)]
        raise ValueError(
            f"{width}x{height} does not fit {model.architecture.title}, whose sides are multiples of {multiple}; "
            f"the nearest sizes are {' and '.join(dict.fromkeys(good))}"
        )


def _near(size: int, multiple: int, up: bool) -> int:
    return max(multiple, -(-size // multiple) * multiple if up else size // multiple * multiple)


def _free_memory() -> int:
    """Bytes of memory that are free, 8 GiB where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 << 30
