"""What a model may cost: a size that is never exceeded, or a quality that is never missed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .formats import Recipe, parse_recipe
from .limits import Limits

__all__ = ["Budget", "gigabytes", "parse_decibels", "parse_size", "split_formats"]

# What is tried where nobody names formats. float8_e5m2 takes the bytes of float8_e4m3fn and has twice its error.
TRIED = ("int8_convrot", "int8_tensorwise", "float8_e4m3fn", "mxfp8", "nvfp4", "convrot_w4a4", "asym_w4a8_int8")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Budget:
    """Exactly one of ``target_size`` (bytes of the finished file, header included) and ``min_sqnr`` (decibels over all
    matrices of the model). ``recipes`` are those to choose from; every layer may also be kept as it is."""

    recipes: tuple[Recipe, ...]
    target_size: int | None = None
    min_sqnr: float | None = None
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def parse(
        cls,
        target_size: str | float | None,
        min_sqnr: str | float | None,
        formats: Iterable[str | Recipe] = (),
        limits: Limits | None = None,
    ) -> Budget | None:
        """None when neither is asked for. Formats in which no layer could be stored under the limits are left out;
        one that was named is an error then. Raises ValueError."""
        if target_size is None and min_sqnr is None:
            return None
        if target_size is not None and min_sqnr is not None:
            raise ValueError("give a size (target_size) or a quality (min_sqnr), not both: each decides alone")
        limits, named = limits or Limits(), tuple(formats)
        recipes = []
        for recipe in map(parse_recipe, named or TRIED):
            problem = limits.problem(recipe)
            if problem is None:
                recipes.append(recipe)
            elif named:
                raise ValueError(f"the format {recipe} is not possible: {problem}")
        if not recipes:
            raise ValueError("no format is left under these limits; ask for a newer ComfyUI or another device")
        size = None if target_size is None else parse_size(target_size)
        return cls(tuple(dict.fromkeys(recipes)), size, None if min_sqnr is None else parse_decibels(min_sqnr), limits)

    def __str__(self) -> str:
        if self.target_size is not None:
            return f"at most {gigabytes(self.target_size)}"
        return f"at least {self.min_sqnr:g} dB"

    def note(self) -> dict[str, Any]:
        """As it is noted in headers and reports."""
        note: dict[str, Any] = {"formats": [str(recipe) for recipe in self.recipes]}
        if self.target_size is not None:
            note["target_size"] = self.target_size
        if self.min_sqnr is not None:
            note["min_sqnr"] = self.min_sqnr
        if self.limits.device:
            note["device"] = self.limits.device
        if self.limits.comfyui:
            note["comfyui"] = ".".join(map(str, self.limits.comfyui))
        return note


def split_formats(text: str) -> list[str]:
    """The recipes of a list: a comma stands between recipes, and between the switches of one recipe too."""
    # For example: int8_convrot,asym_w4a8_int8:group=32,codebook=no
    found: list[str] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if "=" in part and ":" not in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def parse_size(size: str | float) -> int:
    """Bytes of a size in words, in decimal or in binary units, or of a plain number. Raises ValueError."""
    # 6GB is six times 10^9, 5.5 GiB is 5.5 times 2^30; 800M, 800MB and 800e6 are the same.
    if isinstance(size, (int, float)):
        number = float(size)
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
        if found is None or (found[3] and not found[2]):
            raise ValueError(f"{size!r} is no size; one looks like 6GB, 5.5GiB or 800MB")
        unit = found[2].upper()
        number = float(found[1]) * (_BINARY[unit] if found[3] else _UNITS[unit])
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{size!r} is no size; one looks like 6GB, 5.5GiB or 800MB")
    return int(number)


def parse_decibels(text: str | float) -> float:
    """35.0 of "35dB", "35 dB" or a number. Raises ValueError."""
    try:
        value = float(re.sub(r"\s*db\s*$", "", text, flags=re.IGNORECASE) if isinstance(text, str) else text)
    except ValueError:
        value = math.nan
    if not abs(value) <= 1000:  # not NaN either; ten to a tenth of it must be a number
        raise ValueError(f"{text!r} is no signal to noise ratio; one looks like 35dB")
    return value


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
