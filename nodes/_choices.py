"""Choices that several nodes offer in the same words."""

from __future__ import annotations

from typing import Any

from ..host import AS_STORED, CARD, GENERIC, NO_STATISTICS, PLAIN_ROUNDING, POLICY_FOLDER, current_host
from ..quant.formats import OFFERED
from ..quant.rounding import ROUNDING
from .io import io

FLOATS = ["bfloat16", "float16", "float32"]
PRECISIONS = [AS_STORED, *FLOATS, *OFFERED]
FOLDERS = ("diffusion_models", "text_encoders", "vae", "checkpoints")
POLICY_HELP = (
    "Which layers are quantized. card: the rules of this architecture, or generic ones for one that NativeDiT does not "
    "know. Or a TOML file in models/quantization_policies."
)


def policy_input(**options: Any) -> Any:
    names = [CARD, GENERIC, *current_host().list_files(POLICY_FOLDER)]
    return io.Combo.Input("policy", options=names, default=CARD, tooltip=POLICY_HELP, **options)


def budget_inputs() -> list[Any]:
    """A size or a quality that decides each layer's format."""
    return [
        io.Float.Input(
            "target_size",
            default=0.0,
            min=0.0,
            max=10_000.0,
            step=0.1,
            optional=True,
            tooltip="Budget in GB: every layer gets the format that gives the best quality in this size. 0 = none.",
        ),
        io.Float.Input(
            "min_sqnr",
            default=0.0,
            min=0.0,
            max=120.0,
            step=0.5,
            optional=True,
            tooltip="Budget in decibels: the smallest model whose signal to noise ratio is at least this (35 is close "
            "to the original). 0 = none.",
        ),
    ]


def craft_inputs() -> list[Any]:
    """Statistics of the layers' inputs, and how weights become codes."""
    return [
        io.Combo.Input(
            "calibration",
            options=[NO_STATISTICS, *current_host().list_statistics()],
            default=NO_STATISTICS,
            optional=True,
            tooltip="Statistics that Calibrate Model wrote, or its output: float8 and nvfp4 layers get input scales, "
            "and a budget counts what changes the outputs.",
        ),
        io.Combo.Input(
            "rounding",
            options=list(ROUNDING),
            default=PLAIN_ROUNDING,
            optional=True,
            tooltip="How weights become codes. feedback takes longer and changes the outputs less, in the same size.",
        ),
        io.Boolean.Input(
            "smooth",
            default=False,
            optional=True,
            tooltip="nvfp4 with statistics: loud inputs share their size with the weights. Needs ComfyUI 0.30; LoRA "
            "behind the model do not fit smoothed layers.",
        ),
    ]


def prefix_input(default: str) -> Any:
    return io.String.Input(
        "filename_prefix",
        default=default,
        tooltip="Subfolders and name in ComfyUI's output folder; a number is added. %year%, %month%, %day%, %hour%, "
        "%minute% and %second% are filled in.",
    )


def any_files() -> list[str]:
    """ "FOLDER/NAME" of every model file in the folders that our nodes read."""
    return [f"{folder}/{name}" for folder in FOLDERS for name in current_host().list_files(folder)]
