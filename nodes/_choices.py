"""Choices that several nodes offer in the same words."""

from __future__ import annotations

from typing import Any

from ..host import AS_STORED, CARD, GENERIC, POLICY_FOLDER, current_host
from ..quant.formats import OFFERED
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
