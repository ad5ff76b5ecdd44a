"""What the machine and the ComfyUI that a file is made for can hold: formats that they lack are left out."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from .formats import FORMATS, Recipe

__all__ = ["Limits", "parse_limits", "parse_version"]

CPU, MPS = "cpu", "mps"
_FLOATS_OF_8_BITS = ("float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Limits:
    """``device``: "" = any, "cpu", "mps", or a CUDA compute capability as "sm89": formats whose fast product needs a
    newer one are left out. ``comfyui``: the oldest version that must read the file, () = any. ``held``: names of the
    formats that the running program can hold, None = all."""

    device: str = ""
    comfyui: tuple[int, ...] = ()
    held: Collection[str] | None = None

    def problem(self, recipe: Recipe, kind: str = "linear") -> str | None:
        """Why a layer ("linear", "embedding", "bank") can't be stored so under these limits, or None."""
        name, fmt = recipe.format, FORMATS[recipe.format]
        if self.held is not None and name not in self.held:
            return f"the running ComfyUI does not hold {name}"
        since = fmt.since.get(kind)
        if self.comfyui and since is not None and parse_version(since) > self.comfyui:
            return f"ComfyUI reads {name} since {since}, asked for is {'.'.join(map(str, self.comfyui))}"
        if self.device == MPS and name in _FLOATS_OF_8_BITS:
            return f"Apple's GPUs have no 8-bit floats, which {name} needs"
        if self.device.startswith("sm"):
            needed = "".join(map(str, fmt.fast_capability))
            if _capability(self.device) < fmt.fast_capability:
                return f"{name} is fast from sm{needed} on, asked for is {self.device}"
        return None


def parse_limits(device: str | None = None, comfyui: str | None = None) -> Limits:
    """``device`` "sm89", "8.9", "cpu", "mps", None; ``comfyui`` "0.29". Raises ValueError."""
    named = (device or "").strip().lower().replace("_", "")
    if re.fullmatch(r"\d+\.\d", named):
        named = "sm" + named.replace(".", "")
    if named not in ("", "any", CPU, MPS) and not re.fullmatch(r"sm\d{2,3}", named):
        raise ValueError(
            f"unknown device {device!r}: give a CUDA compute capability (sm75, sm86, sm89, sm90, sm100, sm120), "
            "cpu or mps"
        )
    return Limits("" if named == "any" else named, parse_version(comfyui) if comfyui else ())


def parse_version(text: str) -> tuple[int, ...]:
    """(0, 29, 0) of "0.29" or "v0.29.0". Raises ValueError."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?.*", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no version of ComfyUI; one looks like 0.29 or 0.33.0")
    return tuple(int(part or 0) for part in found.groups())


def _capability(device: str) -> tuple[int, int]:
    digits = device.removeprefix("sm")
    return int(digits[:-1]), int(digits[-1])
