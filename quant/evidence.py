"""Decides how one layer is stored from what its file holds: dtypes, shapes, sibling scales, and the notes about it.

Types and shapes can't lie (the bytes are there), notes can. So the stored tensors choose the family of formats, and a
note chooses among what they leave open. The one thing that neither shows is whether int8 codes were rotated: there
the note is all there is, and without one the layer is undecidable.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .claims import Claim, Evidence, Unsettled, read_claim
from .formats import FORMATS, possible_groups, round_up
from .layer import Layer
from .markers import MARKER
from .readings import BYTES, FLOAT8, SCALES, read_tensors

__all__ = ["Evidence", "Unsettled", "candidates", "settle"]

_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})


def settle(evidence: Evidence) -> Layer | None:
    """The layer's normal form, or None when it is not quantized. Raises Unsettled."""
    weight = evidence.infos.get("weight")
    marker, header = read_claim(evidence.marker), read_claim(evidence.header)
    if weight is None:
        if marker is not None or header is not None:
            raise Unsettled("damaged", "it has a marker but no weight: part of the file is missing")
        return None
    if marker is not None and header is not None and _differ(marker, header):
        raise Unsettled(
            "undecidable", f"its marker {evidence.marker} and the file's header {evidence.header} contradict each other"
        )
    claim = marker or header
    if weight.dtype in _FLOATS:
        return _plain(evidence, claim)
    if weight.dtype not in (*FLOAT8, *BYTES):
        if claim is not None:
            raise Unsettled("unsupported", f"its weight is {weight.dtype}, which no ComfyUI format uses")
        return None
    if len(weight.shape) < 2 or 0 in weight.shape:
        return _unscaled(evidence)
    _refuse_foreign(evidence, claim)
    layer = read_tensors(evidence, claim)
    if layer is None:
        return None
    layer = _with_notes(evidence, claim, layer)
    _check_against_header(evidence, layer)
    return layer


def _differ(first: Claim, second: Claim) -> bool:
    if first.format and second.format and first.format != second.format:
        return True
    return first.rotation != second.rotation if "int8_tensorwise" in (first.format, second.format) else False


def _plain(evidence: Evidence, claim: Claim | None) -> None:
    """A float weight is not quantized, whatever a marker says; a scale beside a claimed one is a contradiction."""
    if claim is not None and claim.format and "weight_scale" in evidence.infos:
        raise Unsettled(
            "undecidable",
            f"its marker says {claim.format} but its weight is {evidence.infos['weight'].dtype} with a weight_scale "
            "beside it: whether the scale is still to be applied can't be seen. Get the original file",
        )
    return None


def _unscaled(evidence: Evidence) -> None:
    weight = evidence.infos["weight"]
    if "weight_scale" in evidence.infos or evidence.marker is not None:
        raise Unsettled("damaged", f"a weight of shape {list(weight.shape)} can't be quantized")
    return None


def _refuse_foreign(evidence: Evidence, claim: Claim | None) -> None:
    """Formats of other libraries that look alike but are not read by ComfyUI."""
    infos = evidence.infos
    if "weight_correction" in infos:
        raise Unsettled(
            "unsupported",
            "it has a weight_correction, as the asymmetric kind of this format has, which ComfyUI ignores: its weights "
            "would be wrong by 40%. Quantize the original again",
        )
    if "weight_scale_inv" in infos:
        raise Unsettled(
            "unsupported",
            "it is block-wise fp8 with a weight_scale_inv, which no version of ComfyUI reads. Start from the original",
        )
    if claim is not None and claim.format is not None and claim.format not in FORMATS:
        known = ", ".join(FORMATS)
        raise Unsettled(
            "unsupported",
            f"its format {claim.format!r} is not one that ComfyUI reads ({known}). Convert the original model instead",
        )
    scale = infos.get("weight_scale")
    if scale is not None and scale.dtype not in (*SCALES, *FLOAT8, "F8_E8M0", "U8"):
        raise Unsettled("damaged", f"its weight_scale is {scale.dtype}, expected a float")
    weight = infos["weight"]
    blocks = scale is not None and scale.dtype in SCALES and len(scale.shape) >= 2 and scale.numel > 1
    if blocks and len(scale.shape) == len(weight.shape) and scale.shape[-1] > 1 and scale.shape[-2] > 1:
        raise Unsettled(
            "unsupported",
            f"its weight_scale {list(scale.shape)} holds one scale per block of {weight.dtype} {list(weight.shape)}, "
            "a block-wise format that ComfyUI does not read. Dequantize it with its author's tool, then quantize",
        )


def _with_notes(evidence: Evidence, claim: Claim | None, layer: Layer) -> Layer:
    """Adds dialect, switches and the remarks that hold for every format."""
    if layer.dialect == "cast":
        return layer
    notes, recipe = list(layer.notes), layer.recipe
    dialect = "comfy_quant" if evidence.marker is not None else "header" if evidence.header is not None else "scales"
    if dialect == "scales" and (evidence.legacy_length is not None or evidence.spelled_legacy):
        dialect = "legacy"
        if evidence.legacy_length == 2:
            recipe = replace(recipe, full_precision=True)
    if claim is not None:
        if claim.full_precision:
            recipe = replace(recipe, full_precision=True)
        if claim.format is None:
            notes.append("its marker names no format; dtype and scales do")
        elif claim.format != recipe.format and not any("its marker says" in note for note in notes):
            notes.append(f"its tensors are {recipe.format}, its marker says {claim.format}")
        if len(layer.shape) == 3 and claim.experts not in (None, layer.shape[0]):
            raise Unsettled("damaged", f"its marker says {claim.experts} experts, its weight has {layer.shape[0]}")
    if evidence.overruled:
        notes.append("its marker was changed after it was written: our record of these bytes was used")
    shape, exact = _logical_shape(evidence, layer)
    scale = evidence.infos.get("weight_scale")
    if scale is not None and not (recipe.format in FLOAT8.values() and scale.shape == (shape[0], 1)):
        expected = FORMATS[recipe.format].entries(shape, recipe)["weight_scale"]
        if (scale.dtype, scale.shape) != expected and not any("uint8" in note for note in notes):
            notes.append(
                f"weight_scale is {scale.dtype} {list(scale.shape)}, ComfyUI writes {expected[0]} {list(expected[1])}"
            )
    return replace(layer, recipe=recipe, dialect=dialect, shape=shape, exact=exact, notes=tuple(notes))


def _logical_shape(evidence: Evidence, layer: Layer) -> tuple[tuple[int, ...], bool]:
    """Undoes padding where our record or the bias says how much there is."""
    padding = FORMATS[layer.recipe.format].padding
    if padding == 1:
        return layer.shape, True
    if evidence.record is not None:
        shape = tuple(evidence.record["shape"])
        rounded = (*shape[:-2], *(round_up(size, padding) for size in shape[-2:]))
        if len(shape) == len(layer.shape) and rounded == layer.shape:
            return shape, True
    rows, columns = layer.shape[-2:]
    bias = evidence.bias
    if bias is not None and bias.shape and round_up(bias.shape[-1], padding) == rows:
        rows = bias.shape[-1]
    quantizer = evidence.infos.get("pre_quant_scale")
    if quantizer is not None and round_up(quantizer.numel, padding) == columns:
        return (*layer.shape[:-2], rows, quantizer.numel), True
    return (*layer.shape[:-2], rows, columns), False


def _check_against_header(evidence: Evidence, layer: Layer) -> None:
    if evidence.record is None or evidence.overruled:
        return
    recorded = read_claim(evidence.record["marker"])
    now = read_claim(layer.marker())
    if recorded.format != now.format or recorded.convrot_groupsize != now.convrot_groupsize:
        raise Unsettled(
            "undecidable",
            f"its marker says {evidence.marker}, but the header's record of when it was quantized says "
            f"{evidence.record['marker']}",
            conflict=True,
        )


def candidates(evidence: Evidence) -> list[Layer]:
    """Every reading of the layer's tensors that is possible when its notes are not believed.

    For int8 codes with one scale per row: not rotated, and rotated over each group that fits; for the other rotated
    formats each group. What a comparison with the original weight chooses from.
    """
    found: list[Layer] = []
    weight = evidence.infos.get("weight")
    if weight is None or weight.dtype not in BYTES or len(weight.shape) < 2:
        return found
    markers: list[dict[str, Any]] = [{"format": "int8_tensorwise"}]
    for group in possible_groups(weight.shape[-1] * 2):
        markers.append({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group})
        markers.append({"format": "convrot_w4a4", "convrot_groupsize": group})
        markers.append({"format": "asym_w4a8_int8", "convrot_groupsize": group})
    for marker in markers:
        guess = replace(evidence, marker=marker, header=None, record=None, has_marker=True, overruled=True)
        try:
            layer = settle(guess)
        except Unsettled:
            continue
        if layer is not None and layer.recipe.format == marker["format"]:
            notes = ("settled by comparing with the original weight",)
            leftovers = (f"{evidence.name}.{MARKER}",) if evidence.has_marker else ()
            found.append(replace(layer, notes=notes, leftovers=leftovers))
    return found
