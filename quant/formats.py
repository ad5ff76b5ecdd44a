"""Every comfy_quant format as data: which tensors a layer has, of which type and shape, and what a weight must fulfil.

A weight is a matrix with one row per output feature or, for a bank of experts, one such matrix per expert; every side
tensor of a bank has the experts in front too.
"""
# Shapes: [N, K] and [E, N, K]. Source of the facts: files written by ComfyUI 0.33, comfy-kitchen's layout classes.

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["FORMATS", "OFFERED", "Format", "Recipe", "format_named", "is_format", "parse_recipe", "possible_groups"]

Shape = tuple[int, ...]
Entry = tuple[str, Shape]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def possible_groups(columns: int) -> list[int]:
    """ConvRot group sizes that fit ``columns``: powers of 4 that divide it."""
    return [4**power for power in range(1, 11) if columns % 4**power == 0]


def _is_group(group: int) -> bool:
    return group in possible_groups(group)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to store a layer: a format and its switches."""

    format: str
    # int8_tensorwise: one scale per row instead of one per tensor.
    row_scales: bool = False
    # The width of the Hadamard rotation, None for none.
    convrot_groupsize: int | None = None
    # Both of asym_w4a8_int8.
    group_size: int | None = None
    codebook: bool = False
    # convrot_w4a4: "int8" asks for the int8 kernel.
    linear_dtype: str | None = None
    # Asks ComfyUI not to multiply in the format.
    full_precision: bool = False

    def marker(self, experts: int | None = None) -> dict[str, Any]:
        """The JSON object that ComfyUI stores beside the layer, with its keys in ComfyUI's order."""
        marker: dict[str, Any] = {"format": self.format}
        if self.format == "int8_tensorwise" and self.convrot_groupsize:
            marker["convrot"] = True
        if self.group_size is not None:
            marker["group_size"] = self.group_size
        if self.convrot_groupsize:
            marker["convrot_groupsize"] = self.convrot_groupsize
        if self.linear_dtype is not None:
            marker["linear_dtype"] = self.linear_dtype
        if self.full_precision:
            marker["full_precision_matrix_mult"] = True
        if experts is not None:
            marker["num_experts"] = experts
        return marker

    def __str__(self) -> str:
        """The recipe as `parse_recipe` reads it."""
        switches = []
        if self.format == "int8_tensorwise":
            switches.append("scale=row" if self.row_scales else "scale=tensor")
        if self.convrot_groupsize and self.format != "int8_tensorwise":
            switches.append(f"convrot={self.convrot_groupsize}")
        elif self.convrot_groupsize:
            switches = [f"convrot={self.convrot_groupsize}"]
        if self.group_size is not None:
            switches.append(f"group={self.group_size}")
            switches.append(f"codebook={'yes' if self.codebook else 'no'}")
        if self.linear_dtype:
            switches.append(f"linear={self.linear_dtype}")
        return self.format + (":" + ",".join(switches) if switches else "")


@dataclass(frozen=True)
class Format:
    """A storage format."""

    name: str
    layout: str
    weight_dtype: str
    # The first ComfyUI that reads it, per kind of layer: "linear", "embedding", "bank". A kind that is absent can't be
    # stored so.
    since: dict[str, str]
    # Scales included.
    bytes_per_weight: float
    entries_of: Callable[[Shape, Recipe], dict[str, Entry]] = field(repr=False)
    constraint: Callable[[Shape, Recipe], str | None] = field(repr=False)
    default: Recipe = field(repr=False)
    packing: int = 1
    padding: int = 1
    # The CUDA compute capability from which its fast matrix product runs.
    fast_capability: tuple[int, int] = (0, 0)
    optional: tuple[str, ...] = ()

    def entries(self, shape: Shape, recipe: Recipe) -> dict[str, Entry]:
        """Key suffix -> (safetensors dtype, shape) of the tensors that hold a weight of ``shape``, marker apart."""
        lead, matrix = shape[:-2], shape[-2:]
        return {suffix: (dtype, (*lead, *size)) for suffix, (dtype, size) in self.entries_of(matrix, recipe).items()}

    def problem(self, shape: Shape, recipe: Recipe, kind: str | None = None) -> str | None:
        """Why a weight of this shape can't be stored so, or None. ``kind`` as in ``since``."""
        if len(shape) not in (2, 3):
            return f"{len(shape)}-D weights are not stored in {self.name}"
        if 0 in shape:
            return "the weight is empty"
        kind = kind or ("bank" if len(shape) == 3 else "linear")
        if kind not in self.since:
            return f"ComfyUI has no {kind} in {self.name}"
        if kind == "bank" and recipe.convrot_groupsize and self.name == "int8_tensorwise":
            return "ComfyUI loses the rotation of int8 expert banks (fault in 0.33); store them without"
        return self.constraint(shape[-2:], recipe)


def _rotation_problem(columns: int, group: int | None) -> str | None:
    if group is None:
        return None
    if not _is_group(group):
        return f"a rotation over {group} columns does not exist (powers of 4: 16, 64, 256)"
    if columns % group:
        return f"{columns} input features can't be divided by the rotation's group {group}"
    return None


def _fp8_entries(dtype: str):
    return lambda shape, recipe: {"weight": (dtype, shape), "weight_scale": ("F32", ())}


def _block_grid(rows: int, columns: int, block: int) -> Shape:
    """Shape of the tiled block scales: 128 x 4 tiles (cuBLAS)."""
    return round_up(rows, 128), round_up(columns // block, 4)


def _nvfp4_entries(shape: Shape, recipe: Recipe) -> dict[str, Entry]:
    rows, columns = (round_up(size, 16) for size in shape)
    return {
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", _block_grid(rows, columns, 16)),
        "weight_scale_2": ("F32", ()),
    }


def _mxfp8_entries(shape: Shape, recipe: Recipe) -> dict[str, Entry]:
    rows, columns = (round_up(size, 32) for size in shape)
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F8_E8M0", _block_grid(rows, columns, 32))}


def _int8_entries(shape: Shape, recipe: Recipe) -> dict[str, Entry]:
    return {"weight": ("I8", shape), "weight_scale": ("F32", (shape[0], 1) if recipe.row_scales else ())}


def _int8_problem(shape: Shape, recipe: Recipe) -> str | None:
    if recipe.convrot_groupsize and not recipe.row_scales:
        return "a rotated int8 weight needs one scale per row"
    return _rotation_problem(shape[1], recipe.convrot_groupsize)


def _w4a4_entries(shape: Shape, recipe: Recipe) -> dict[str, Entry]:
    return {"weight": ("I8", (shape[0], shape[1] // 2)), "weight_scale": ("F32", (shape[0],))}


def _w4a4_problem(shape: Shape, recipe: Recipe) -> str | None:
    if recipe.linear_dtype not in (None, "int4", "int8"):
        return f"linear_dtype {recipe.linear_dtype!r} does not exist (int4, int8)"
    if shape[1] % 64:
        return f"{shape[1]} input features can't be divided by 64"
    return _rotation_problem(shape[1], recipe.convrot_groupsize)


def _w4a8_entries(shape: Shape, recipe: Recipe) -> dict[str, Entry]:
    rows, columns = shape
    entries: dict[str, Entry] = {
        "weight": ("I8", (rows, columns // 2)),
        "weight_s_rel": ("F8_E4M3", (rows, columns // recipe.group_size)),
        "weight_s_channel": ("F32", (rows,)),
    }
    if recipe.codebook:
        entries["weight_codebook"] = ("F32", (16,))
    return entries


def _w4a8_problem(shape: Shape, recipe: Recipe) -> str | None:
    group = recipe.group_size
    if not group or group < 4 or (16 % group and group % 16):
        return f"group_size {group} does not exist (4, 8, 16 or a multiple of 16)"
    if shape[1] % 16 or shape[1] % group:
        return f"{shape[1]} input features can't be divided by 16 and by the group size {group}"
    return _rotation_problem(shape[1], recipe.convrot_groupsize)


def _any_shape(shape: Shape, recipe: Recipe) -> str | None:
    return None


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format(
            "float8_e4m3fn",
            "TensorCoreFP8Layout",
            "F8_E4M3",
            {"linear": "0.4.0", "embedding": "0.21.0", "bank": "0.23.0"},
            1.0,
            _fp8_entries("F8_E4M3"),
            _any_shape,
            Recipe("float8_e4m3fn"),
            fast_capability=(8, 9),
            optional=("input_scale",),
        ),
        Format(
            "float8_e5m2",
            "TensorCoreFP8Layout",
            "F8_E5M2",
            {"linear": "0.8.0", "embedding": "0.21.0", "bank": "0.23.0"},
            1.0,
            _fp8_entries("F8_E5M2"),
            _any_shape,
            Recipe("float8_e5m2"),
            fast_capability=(8, 9),
            optional=("input_scale",),
        ),
        Format(
            "nvfp4",
            "TensorCoreNVFP4Layout",
            "U8",
            {"linear": "0.8.0", "bank": "0.23.0"},
            0.5625,
            _nvfp4_entries,
            _any_shape,
            Recipe("nvfp4"),
            packing=2,
            padding=16,
            fast_capability=(10, 0),
            optional=("input_scale", "pre_quant_scale"),
        ),
        Format(
            "mxfp8",
            "TensorCoreMXFP8Layout",
            "F8_E4M3",
            {"linear": "0.18.0", "bank": "0.23.0"},
            1.03125,
            _mxfp8_entries,
            _any_shape,
            Recipe("mxfp8"),
            padding=32,
            fast_capability=(10, 0),
            optional=("input_scale",),
        ),
        Format(
            "int8_tensorwise",
            "TensorWiseINT8Layout",
            "I8",
            {"linear": "0.27.0", "embedding": "0.30.0", "bank": "0.27.0"},
            1.0,
            _int8_entries,
            _int8_problem,
            Recipe("int8_tensorwise", row_scales=True),
            fast_capability=(7, 5),
            optional=("input_scale",),
        ),
        Format(
            "convrot_w4a4",
            "TensorCoreConvRotW4A4Layout",
            "I8",
            {"linear": "0.28.0", "bank": "0.28.0"},
            0.5,
            _w4a4_entries,
            _w4a4_problem,
            Recipe("convrot_w4a4", convrot_groupsize=256),
            packing=2,
            fast_capability=(7, 5),
        ),
        Format(
            "asym_w4a8_int8",
            "AsymW4A8Int8Layout",
            "I8",
            {"linear": "0.31.0"},
            0.5625,
            _w4a8_entries,
            _w4a8_problem,
            Recipe("asym_w4a8_int8", convrot_groupsize=256, group_size=16, codebook=True),
            packing=2,
            fast_capability=(8, 0),
        ),
    )
}

ALIASES: dict[str, Recipe] = {
    "int8_convrot": Recipe("int8_tensorwise", row_scales=True, convrot_groupsize=256),
}

# What people are offered, the safest first.
OFFERED = (
    "int8_convrot",
    "int8_tensorwise",
    "float8_e4m3fn",
    "float8_e5m2",
    "mxfp8",
    "nvfp4",
    "convrot_w4a4",
    "asym_w4a8_int8",
)


def is_format(name: str) -> bool:
    """Whether this word (switches may follow it) is a quantization format, not a plain number format."""
    return name.partition(":")[0] in (*FORMATS, *ALIASES)


_SWITCH = r"(scale|convrot|group|codebook|linear)=(\w+)"
_SWITCHES = ("scale=row|tensor", "convrot=SIZE|no", "group=SIZE", "codebook=yes|no", "linear=int4|int8")


def format_named(name: str) -> Format:
    """Raises ValueError that lists the known formats."""
    try:
        return FORMATS[name]
    except KeyError:
        known = ", ".join([*FORMATS, *ALIASES])
        raise ValueError(f"unknown quantization format {name!r}; known: {known}") from None


def parse_recipe(text: str | Recipe) -> Recipe:
    """A format's name, or its name and switches behind a colon. A bare name takes the format's defaults.

    Raises ValueError.
    """
    # For example int8_convrot, int8_tensorwise:scale=tensor (by default one scale per row and no rotation),
    # convrot_w4a4:convrot=64,linear=int8.
    if isinstance(text, Recipe):
        format_named(text.format)
        return text
    name, _, switches = text.strip().partition(":")
    recipe = ALIASES.get(name) or format_named(name).default
    for switch in filter(None, switches.split(",")):
        match = re.fullmatch(_SWITCH, switch.strip())
        if match is None:
            raise ValueError(f"can't read {switch!r} in the format {text!r}; switches are " + ", ".join(_SWITCHES))
        recipe = _switched(recipe, match[1], match[2], text)
    return recipe


def _switched(recipe: Recipe, key: str, value: str, text: str) -> Recipe:
    applies = {
        "scale": ("int8_tensorwise",),
        "convrot": ("int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8"),
        "group": ("asym_w4a8_int8",),
        "codebook": ("asym_w4a8_int8",),
        "linear": ("convrot_w4a4",),
    }[key]
    if recipe.format not in applies:
        raise ValueError(f"{key}= does not apply to {recipe.format} (in {text!r})")
    if key == "scale" and value in ("row", "tensor"):
        return replace(recipe, row_scales=value == "row", convrot_groupsize=None)
    if key == "convrot" and value == "no" and recipe.format == "int8_tensorwise":
        return replace(recipe, convrot_groupsize=None)
    if key == "convrot" and value.isdecimal() and _is_group(int(value)):
        return replace(recipe, convrot_groupsize=int(value), row_scales=recipe.format == "int8_tensorwise")
    if key == "group" and value.isdecimal():
        return replace(recipe, group_size=int(value))
    if key == "codebook" and value in ("yes", "no"):
        return replace(recipe, codebook=value == "yes")
    if key == "linear" and value in ("int4", "int8"):
        return replace(recipe, linear_dtype=value)
    raise ValueError(f"{key}={value} is not possible in the format {text!r}")
