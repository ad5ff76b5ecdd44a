"""What this machine and its packages can do with every format."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .formats import FORMATS, OFFERED, parse_recipe
from .kitchen import layout_of
from .surgery import input_unit

__all__ = ["examine"]


def examine() -> dict[str, Any]:
    """What is installed, and a row per format: "problem" is why it can't be made here, "" if it can."""
    name, capability = _device()
    rows = []
    for offered in OFFERED:
        recipe = parse_recipe(offered)
        rows.append(
            {
                "format": offered,
                "problem": _problem(recipe.format),
                "fast": capability >= FORMATS[recipe.format].fast_capability and name.startswith("cuda"),
                "comfyui": dict(FORMATS[recipe.format].since),
                "inputs": input_unit(recipe),
            }
        )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "comfy-kitchen": _kitchen(),
        "device": name,
        "formats": rows,
    }


def _device() -> tuple[str, tuple[int, int]]:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda, {torch.cuda.get_device_name()}, sm{major}{minor}", (major, minor)
    return ("mps" if torch.backends.mps.is_available() else "cpu"), (0, 0)


def _kitchen() -> str:
    try:
        return version("comfy-kitchen")
    except PackageNotFoundError:
        return "not installed"


def _problem(name: str) -> str:
    try:
        layout_of(name)
    except ImportError as error:
        return str(error)
    return ""
