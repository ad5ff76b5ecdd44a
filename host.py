"""What a node may ask of the program it runs in: ComfyUI (``bridge``) or the embedded engine (``engine``).

Objects that travel between nodes, such as models and latents, are the host's own; nodes pass them on and never look
inside. What a node executes is one call on the host, so every node is written once and runs in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .supported_models import AUTO, Settings

AS_STORED = "as stored"
CARD = "card"
GENERIC = "generic"
# In models/: TOML files that say which layers to quantize, and how.
POLICY_FOLDER = "quantization_policies"
# In the output folder: statistics of layers' inputs, as the calibrating node writes them; and the choice of none.
STATISTICS_FOLDER = "calibration"
NO_STATISTICS = "none"
PLAIN_ROUNDING = "plain"
# Settings of ``Host.sample`` that leave the choice to the model's card.
PUBLISHED = {"sampler": AUTO, "scheduler": AUTO, "shift": 0.0, "denoise": 1.0}


@dataclass(frozen=True)
class Graph:
    """What a node knows of the graph that it is part of: the prompt, more that belongs into a file's header (the
    workflow as drawn), and its own id there."""

    prompt: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None
    node_id: str | None = None


@dataclass(frozen=True)
class Saved:
    """A file that a node has written. shown: {"filename", "subfolder", "type"}, as ComfyUI's interface names files."""

    path: str
    text: str
    shown: Mapping[str, str]


@dataclass(frozen=True)
class Pictured:
    """A report as text and as an IMAGE [1, H, W, 3] from 0 to 1."""

    text: str
    image: Any


@dataclass(frozen=True)
class Quantized:
    """A MODEL with quantized weights, and what was decided of every layer."""

    model: Any
    report: Pictured


@dataclass(frozen=True)
class Sampled:
    """A sampled LATENT, and the settings it was made with, all of them decided."""

    latent: dict[str, Any]
    settings: Settings


class Host(Protocol):
    """All methods raise exceptions whose message says what to do; a node adds nothing to them."""

    name: str

    def list_files(self, folder: str) -> list[str]:
        """Names (relative, as the host shows them) of the files in a models folder: "diffusion_models",
        "text_encoders", "vae", "loras"."""

    def list_model_folders(self) -> list[str]:
        """ "FOLDER/NAME" of the diffusers folders and sharded models among the models."""

    def list_statistics(self) -> list[str]:
        """The files of statistics that are here, named as the calibration inputs of nodes take them."""

    def fingerprint_rules(self, policy: str, calibration: str) -> str:
        """Changes when the policy's file or that of the statistics does; never raises for one that is gone."""

    def fingerprint_source(self, source: str) -> str:
        """Changes when the file or folder "FOLDER/NAME", or anything in it, does; never raises."""

    def fingerprint(self, folder: str, file: str, policy: str = CARD, architecture: str = AUTO) -> str:
        """Changes when the file or the policy's file does, or when "auto" (for ``architecture``) means another file;
        never raises for one that is gone."""

    def load_diffusion_model(
        self,
        file: str,  # in diffusion_models, or "checkpoints/NAME", or "auto": the best one here for the architecture
        *,
        architecture: str = AUTO,  # a card's name or "auto"
        precision: str = AS_STORED,  # "as stored", a dtype's name, or a quantization format
        policy: str = CARD,  # which layers are quantized: "card", "generic" or a file in models/quantization_policies
        # A budget in GB or in decibels, 0 = none.
        target_size: float = 0.0,
        min_sqnr: float = 0.0,
        # Statistics of the layers' inputs, a file in the output folder, or "none"; they give input scales and weight
        # the errors of a budget.
        calibration: str = NO_STATISTICS,
        rounding: str = PLAIN_ROUNDING,  # one of quant.rounding.ROUNDING
        smooth: bool = False,  # by the statistics, nvfp4 layers too
    ) -> Any:
        """A model. Within a budget every layer gets the format that serves it best: the precision named, or any that
        the host holds where it is to be as stored."""

    def load_text_encoder(self, file: str, *, architecture: str = AUTO, precision: str = AS_STORED) -> Any:
        """A CLIP that encodes prompts the way ``architecture`` was trained with. file: "auto" as for models."""

    def encode_negative_prompt(self, clip: Any, text: str) -> Any:
        """A CONDITIONING of what a picture shall not show, as the model's publisher encodes it."""

    def load_vae(self, file: str, *, precision: str = AUTO, architecture: str = AUTO) -> Any:
        """A VAE. file: in models/vae, or "pixel_space" for models that work on pixels, or "auto": the best one that is
        here for the architecture; precision: dtype of weights and computation, "auto" = the host's choice."""

    def empty_latent(self, model: Any, *, width: int, height: int, batch_size: int) -> dict[str, Any]:
        """A LATENT of zeros, with the channels and the compression of ``model``. width, height: in pixels of the
        finished picture, 0 = the model's own default. Raises ValueError on a size the model's patches don't divide."""

    def samplers(self) -> list[str]:
        """Names of the samplers that ``sample`` knows."""

    def schedulers(self) -> list[str]:
        """Names of the schedules that ``sample`` knows."""

    def sample(
        self,
        model: Any,
        positive: Any,
        negative: Any,
        latent: dict[str, Any],
        *,
        seed: int,
        steps: int = 0,
        cfg: float = -1.0,
        sampler: str = AUTO,
        scheduler: str = AUTO,
        shift: float = 0.0,
        denoise: float = 1.0,
        graph: Graph,
    ) -> Sampled:
        """Sample a LATENT; steps 0, cfg below 0, "auto" and shift 0 mean what the model's card says. Raises ValueError
        where something is left open for a model without a card."""

    def set_model_sampling(self, model: Any, *, shift: float = 0.0, latent: dict[str, Any] | None = None) -> Any:
        """A MODEL with this time shift; 0: that of ``latent``'s size, or of the model's default size."""

    def set_conditions(self, conditioning: Any, values: Mapping[str, Any]) -> Any:
        """A conditioning that carries these values beside its prompts, for models that ask for them by name."""

    def set_adaptive_projected_guidance(self, model: Any, *, limit: float) -> Any:
        """A MODEL guided without the part of the guidance that points along the prediction."""

    def set_patch_renormalized_guidance(self, model: Any, *, patch_size: int) -> Any:
        """A MODEL whose guided prediction has, patch by patch, the length of the unguided one. patch_size: in latent
        pixels."""

    def quantize_model(self, model: Any, *, precision: str, policy: str = CARD, keep: Sequence[str] = ()) -> Any:
        """A model with quantized weights, its patches baked; the one given stays as it is. Layers to keep are named by
        globs."""

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
        """The same with its report; a budget, calibration and rounding as of ``load_diffusion_model`` (precision
        "auto" = any format)."""

    def calibrate_model(
        self,
        model: Any,
        positive: Any,
        negative: Any,
        latent: dict[str, Any],
        *,
        seed: int,
        steps: int = 0,
        cfg: float = -1.0,
        prefix: str,
        graph: Graph,
    ) -> Saved:
        """Sample as ``sample`` does and write what the model's linear layers were given (``quant.calibration``)."""

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
        """One safetensors file in the output folder, complete or not at all. prefix: subfolders, a name, templates."""

    def save_text_encoder(
        self, clip: Any, *, prefix: str, precision: str = AS_STORED, policy: str = CARD, graph: Graph
    ) -> list[Saved]:
        """The same for a CLIP and its tokenizer; one file per text encoder in it."""

    def save_vae(self, vae: Any, *, prefix: str, precision: str = AS_STORED, graph: Graph) -> Saved:
        """The same for a VAE."""

    def inspect_checkpoint(self, file: str) -> Pictured:
        """What a file of the models folder holds, layer by layer, and what is wrong with it; named as folder/name."""

    def repair_checkpoint(self, file: str, *, prefix: str, original: str | None = None) -> Saved:
        """The quantized file in the form that ComfyUI loads. The original is the unquantized model, named as
        folder/name, which settles what the file does not say."""

    def convert_checkpoint(
        self, source: str, *, prefix: str, layout: str = "comfy", component: str = AUTO, architecture: str = AUTO
    ) -> Saved:
        """A model in another layout, in the output folder: one file ("comfy"), a folder ("diffusers"), a folder of one
        file per part (component "all"). source: "FOLDER/NAME", a file or one of ``list_model_folders``."""

    def compare_models(self, reference: Any, model: Any) -> Pictured:
        """How far the weights of ``model`` are from those of ``reference``, layer by layer, in decibels."""


_current: Host | None = None


def set_host(host: Host | None) -> None:
    """Called by the host itself when it starts (ComfyUI's side: once; the engine: for every run)."""
    global _current
    _current = host


def current_host() -> Host:
    """The running host. Raises RuntimeError when a node is called outside of one."""
    if _current is None:
        raise RuntimeError("no host: NativeDiT's nodes run inside ComfyUI or through `nativedit run`")
    return _current
