"""What the tensors of one layer can be, family by family: dtypes, shapes and sibling scales, weights unread.

Each function reads one family of formats and raises Unsettled where its parts contradict each other, or where nothing
in the file says what is left open.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..files import TensorInfo
from .claims import Claim, Evidence, Unsettled
from .formats import FORMATS, Recipe, possible_groups, round_up
from .layer import Layer

__all__ = ["BYTES", "FLOAT8", "SCALES", "read_tensors"]

SCALES = frozenset({"F32", "F16", "BF16", "F64"})
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
BYTES = frozenset({"U8", "I8"})


def read_tensors(evidence: Evidence, claim: Claim | None) -> Layer | None:
    """The layer that its tensors show; the claim decides what they leave open. None: not quantized."""
    infos, weight = evidence.infos, evidence.infos["weight"]
    if "weight_s_rel" in infos or "weight_s_channel" in infos:
        return _w4a8(evidence, claim)
    if "weight_scale_2" in infos:
        return _nvfp4(evidence, claim)
    if weight.dtype in FLOAT8:
        return _float8(evidence, claim, FLOAT8[weight.dtype])
    if weight.dtype == "U8":
        if claim is not None and claim.format in FLOAT8.values() and "weight_scale" in infos:
            return _float8(evidence, claim, claim.format, notes=("float8 bytes stored as uint8",))
        if claim is not None and claim.format == "mxfp8" and "weight_scale" in infos:
            return _float8(evidence, claim, "float8_e4m3fn", notes=("float8 bytes stored as uint8",))
        if claim is None and "weight_scale" not in infos:
            return None
        said = f"a marker for {claim.format}" if claim is not None and claim.format else "no usable marker"
        raise Unsettled(
            "undecidable" if claim is None else "damaged",
            f"uint8 weight {list(weight.shape)} with {said} and the tensors {', '.join(sorted(infos))}: "
            "no ComfyUI format looks like this",
        )
    return _int8(evidence, claim)


def _layer(evidence: Evidence, recipe: Recipe, shape: tuple[int, ...], **extra: Any) -> Layer:
    keys = {role: info.name for role, info in evidence.infos.items()}
    leftovers = (f"{evidence.name}.comfy_quant",) if evidence.has_marker else ()
    return Layer(evidence.name, recipe, shape, keys, leftovers=leftovers, **extra)


def _cast(evidence: Evidence) -> Layer:
    weight = evidence.infos["weight"]
    return _layer(evidence, Recipe(FLOAT8[weight.dtype]), weight.shape, dialect="cast")


def _is_blocked(scale: TensorInfo, rows: int, columns: int, block: int, lead: tuple[int, ...]) -> bool:
    grid = (round_up(rows, 128), round_up(columns // block, 4))
    return columns % block == 0 and (scale.shape == (*lead, *grid) or scale.numel == _product(lead) * grid[0] * grid[1])


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _float8(evidence: Evidence, claim: Claim | None, name: str, notes: tuple[str, ...] = ()) -> Layer:
    weight, scale = evidence.infos["weight"], evidence.infos.get("weight_scale")
    if scale is None:
        if claim is not None and claim.format:
            raise Unsettled("damaged", f"its marker says {claim.format} but its weight_scale is missing")
        return _cast(evidence)
    lead, (rows, columns) = weight.shape[:-2], weight.shape[-2:]
    if scale.dtype in ("F8_E8M0", "U8"):
        if name == "float8_e4m3fn" and _is_blocked(scale, rows, columns, 32, lead):
            if scale.dtype == "U8":
                notes += ("block scales stored as uint8",)
            return _layer(evidence, Recipe("mxfp8"), weight.shape, exact=False, notes=notes)
        raise Unsettled(
            "damaged",
            f"its {scale.dtype} weight_scale {list(scale.shape)} does not fit the weight {weight.dtype} "
            f"{list(weight.shape)} in any format",
        )
    experts = _product(lead)
    per_expert = len(weight.shape) == 3 and scale.numel == experts
    per_row = len(weight.shape) == 2 and scale.numel == rows and scale.numel > 1
    if scale.numel != 1 and not per_expert and not per_row:
        raise Unsettled(
            "damaged",
            f"its weight_scale has {scale.numel} elements ({list(scale.shape)}); a {name} weight {list(weight.shape)} "
            f"needs 1{f', {experts} (one per expert)' if len(weight.shape) == 3 else f' (or {rows}, one per row)'}",
        )
    recipe = Recipe(name)
    if per_row:
        # ComfyUI dequantizes it right, but its fast product raises on such a scale.
        recipe = replace(recipe, full_precision=True)
        if claim is None or not claim.full_precision:
            notes += ("one scale per row: only usable with full precision products",)
    return _layer(evidence, recipe, weight.shape, notes=notes)


def _nvfp4(evidence: Evidence, claim: Claim | None) -> Layer:
    infos = evidence.infos
    weight, scale, second = infos["weight"], infos.get("weight_scale"), infos["weight_scale_2"]
    lead, (rows, packed) = weight.shape[:-2], weight.shape[-2:]
    if scale is None:
        raise Unsettled("damaged", "it has a weight_scale_2 (nvfp4) but its weight_scale is missing")
    fits = weight.dtype in BYTES and scale.dtype in ("F8_E4M3", "U8") and _is_blocked(scale, rows, packed * 2, 16, lead)
    if not fits or second.numel != _product(lead) or second.dtype not in SCALES:
        raise Unsettled(
            "damaged",
            f"weight {weight.dtype} {list(weight.shape)}, weight_scale {scale.dtype} {list(scale.shape)} and "
            f"weight_scale_2 {list(second.shape)} do not fit together as nvfp4",
        )
    quantizer = infos.get("pre_quant_scale")
    if quantizer is not None and quantizer.numel > packed * 2:
        raise Unsettled("damaged", f"its pre_quant_scale {list(quantizer.shape)} does not fit {packed * 2} columns")
    notes = ("block scales stored as uint8",) if scale.dtype == "U8" else ()
    shape = (*lead, rows, packed * 2)
    return _layer(evidence, Recipe("nvfp4"), shape, exact=False, notes=notes)


def _w4a8(evidence: Evidence, claim: Claim | None) -> Layer:
    infos = evidence.infos
    weight, relative, channel = infos["weight"], infos.get("weight_s_rel"), infos.get("weight_s_channel")
    if relative is None or channel is None:
        missing = "weight_s_rel" if relative is None else "weight_s_channel"
        raise Unsettled("damaged", f"it looks like asym_w4a8_int8 but its {missing} is missing")
    if len(weight.shape) != 2 or len(relative.shape) != 2:
        raise Unsettled("unsupported", f"asym_w4a8_int8 weights are 2-D, this one is {list(weight.shape)}")
    rows, columns = weight.shape[0], weight.shape[1] * 2
    groups = relative.shape[1]
    if groups and weight.shape[1] * 4 % 3 == 0 and claim is not None and claim.group_size:
        six_bit = weight.shape[1] * 4 // 3
        if columns != groups * claim.group_size and six_bit == groups * claim.group_size:
            raise Unsettled(
                "unsupported", "it holds 6-bit codes, which the supported ComfyUI versions do not read. Use 4 bits"
            )
    if (
        weight.dtype not in BYTES
        or not groups
        or columns % groups
        or relative.shape[0] != rows
        or channel.numel != rows
    ):
        raise Unsettled(
            "damaged",
            f"weight {weight.dtype} {list(weight.shape)}, weight_s_rel {list(relative.shape)} and weight_s_channel "
            f"{list(channel.shape)} do not fit together as asym_w4a8_int8",
        )
    group_size = columns // groups
    notes: tuple[str, ...] = ()
    if claim is None or claim.convrot_groupsize is None:
        if claim is None or claim.format is None:
            raise Unsettled("undecidable", _no_rotation_note("asym_w4a8_int8", columns))
        notes += ("rotation group not noted: the default, 256",)
    if claim is not None and claim.group_size not in (None, group_size):
        notes += (f"group size {group_size} by its tensors, {claim.group_size} by its marker",)
    recipe = Recipe(
        "asym_w4a8_int8",
        convrot_groupsize=(claim and claim.convrot_groupsize) or 256,
        group_size=group_size,
        codebook="weight_codebook" in infos,
    )
    return _checked(evidence, recipe, (rows, columns), notes)


def _int8(evidence: Evidence, claim: Claim | None) -> Layer | None:
    weight, scale = evidence.infos["weight"], evidence.infos.get("weight_scale")
    if scale is None:
        if claim is not None and claim.format:
            raise Unsettled("damaged", f"its marker says {claim.format} but its weight_scale is missing")
        if evidence.has_marker:
            raise Unsettled("damaged", "its weight is int8 but its marker is empty and it has no scale")
        return None
    if scale.dtype not in SCALES:
        raise Unsettled("damaged", f"its weight_scale is {scale.dtype}, an int8 weight needs a float scale")
    lead, (rows, stored) = weight.shape[:-2], weight.shape[-2:]
    experts = _product(lead)
    if claim is not None and claim.format == "convrot_w4a4":
        return _w4a4(evidence, claim, scale, (*lead, rows, stored * 2))
    row_scales = scale.numel == experts * rows and (scale.numel > experts or scale.shape[-1:] == (1,))
    if scale.numel != experts and scale.numel != 1 and not row_scales:
        raise Unsettled(
            "damaged",
            f"its weight_scale has {scale.numel} elements ({list(scale.shape)}); an int8 weight {list(weight.shape)} "
            f"needs 1 or {experts * rows} (one per row)",
        )
    if row_scales and rows == 1 and len(scale.shape) < 2 and not (claim and claim.convrot):
        row_scales = False
    notes: tuple[str, ...] = ()
    if claim is not None and claim.format not in (None, "int8_tensorwise"):
        notes += (f"its tensors are int8 with a scale, its marker says {claim.format}",)
    group = _int8_rotation(evidence, claim, row_scales, stored)
    if group is not None and not row_scales:
        raise Unsettled("damaged", "its marker says it is rotated, but a rotated int8 weight has one scale per row")
    if claim is not None and claim.convrot and claim.convrot_groupsize is None:
        notes += ("rotation group not noted: the default, 256",)
    recipe = Recipe("int8_tensorwise", row_scales=row_scales, convrot_groupsize=group)
    return _checked(evidence, recipe, weight.shape, notes)


def _int8_rotation(evidence: Evidence, claim: Claim | None, row_scales: bool, columns: int) -> int | None:
    """The rotation's group or None; raises Unsettled where nothing in the file says."""
    if claim is not None and claim.format in (None, "int8_tensorwise") and claim != Claim():
        return claim.rotation
    if not row_scales or not possible_groups(columns):
        return None  # a rotated weight has one scale per row, and a group divides the columns
    raise Unsettled("undecidable", _no_rotation_note("int8", columns))


def _no_rotation_note(kind: str, columns: int) -> str:
    groups = ", ".join(str(group) for group in possible_groups(columns))
    return (
        f"its {kind} codes may or may not be rotated (groups that fit {columns} columns: {groups}), and no usable "
        "marker says so. Repair it with the unquantized model as the original"
    )


def _w4a4(evidence: Evidence, claim: Claim, scale: TensorInfo, shape: tuple[int, ...]) -> Layer:
    rows = _product(shape[:-1])
    if scale.numel != rows:
        raise Unsettled(
            "damaged", f"its weight_scale has {scale.numel} elements, convrot_w4a4 needs {rows} (one per row)"
        )
    notes = ("rotation group not noted: the default, 256",) if claim.convrot_groupsize is None else ()
    recipe = Recipe("convrot_w4a4", convrot_groupsize=claim.convrot_groupsize or 256, linear_dtype=claim.linear_dtype)
    return _checked(evidence, recipe, shape, notes)


def _checked(evidence: Evidence, recipe: Recipe, shape: tuple[int, ...], notes: tuple[str, ...]) -> Layer:
    """Refuses switches that the shape makes impossible."""
    problem = FORMATS[recipe.format].constraint(shape[-2:], recipe)
    if problem is not None:
        groups = ", ".join(str(group) for group in possible_groups(shape[-1])) or "none"
        raise Unsettled("undecidable", f"its marker can't be right: {problem}. Groups that fit: {groups}")
    return _layer(evidence, recipe, shape, notes=notes)
