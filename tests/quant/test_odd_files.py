"""Odd quantized files from the field: what the file settles loads right, the rest is refused with the layer's name.

Ids as in the table of cases (M: what ComfyUI's core does silently; A: what people report).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from quant_goldens import same_bytes
from safetensors.torch import load_file, save_file
from support import rel_err

from nativedit.files import open_source
from nativedit.quant.dequantize import dequantize
from nativedit.quant.describe import describe
from nativedit.quant.errors import QuantError
from nativedit.quant.formats import parse_recipe
from nativedit.quant.kitchen import quantize_matrix, tensor_scale
from nativedit.quant.markers import encode_marker
from nativedit.quant.ops import DequantizedOps
from nativedit.quant.reader import canonical_state_dict, read_quantized
from nativedit.quant.repair import repair

pytestmark = pytest.mark.usefixtures("single_thread")

# Relative error of a weight that was read rightly.
RIGHT = {"int8": 0.02, "fp8": 0.06, "nvfp4": 0.12, "w4": 0.2}
N, K = 128, 256


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 0.05


def stored(weight: torch.Tensor, recipe: str) -> dict[str, torch.Tensor]:
    parsed = parse_recipe(recipe)
    return quantize_matrix(weight, parsed, scale=tensor_scale(parsed, weight.abs().amax()))


def layer(tensors: dict[str, torch.Tensor], marker=None, name="blocks.0.up") -> dict[str, torch.Tensor]:
    entries = {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    if marker is not None:
        entries[f"{name}.comfy_quant"] = encode_marker(marker) if isinstance(marker, dict) else marker
    return entries


def weight_of(tmp_path: Path, entries: dict[str, torch.Tensor], metadata=None, name="blocks.0.up") -> torch.Tensor:
    """The float weight that three doors agree on: dequantize, repair + dequantize, and a module."""
    path = tmp_path / "odd.safetensors"
    save_file(entries, path, metadata)
    dequantize(path, tmp_path / "float.safetensors", dtype="float32")
    direct = load_file(tmp_path / "float.safetensors")[f"{name}.weight"]
    repair(path, tmp_path / "canonical.safetensors")
    assert not [note for layer in describe(tmp_path / "canonical.safetensors").layers for note in layer.notes]
    dequantize(tmp_path / "canonical.safetensors", tmp_path / "again.safetensors", dtype="float32")
    assert torch.equal(load_file(tmp_path / "again.safetensors")[f"{name}.weight"], direct)
    with open_source(path) as source:
        state = canonical_state_dict(source, prefix=f"{name}.")
    module = DequantizedOps.Linear(direct.shape[1], direct.shape[0], bias=False, device="meta")
    module.load_state_dict(state, strict=True, assign=True)
    assert torch.equal(module.dequantized(torch.float32), direct)
    return direct


def refusal(tmp_path: Path, entries: dict[str, torch.Tensor], metadata=None) -> str:
    """The message of the refusal, which every door gives."""
    path = tmp_path / "odd.safetensors"
    save_file(entries, path, metadata)
    messages = []
    for door in (
        lambda: dequantize(path, tmp_path / "float.safetensors"),
        lambda: repair(path, tmp_path / "canonical.safetensors"),
        lambda: canonical_state_dict(open_source(path)),
    ):
        with pytest.raises(QuantError) as error:
            door()
        messages.append(str(error.value))
    assert not (tmp_path / "float.safetensors").exists() and not (tmp_path / "canonical.safetensors").exists()
    assert len(set(messages)) == 1 and str(path) in messages[0]
    if len(error.value.problems) == 1:
        assert "'blocks.0.up'" in messages[0]
        assert describe(path).problems[0].layer == "blocks.0.up"
    return messages[0]


# ---- M01: scales in every spelling -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(N, 1), (N,), (1, N)])
def test_m01_row_scales_of_any_shape_and_float_type(tmp_path, weight, shape, dtype):
    tensors = stored(weight, "int8_tensorwise")
    tensors["weight_scale"] = tensors["weight_scale"].reshape(shape).to(dtype)
    assert rel_err(weight_of(tmp_path, layer(tensors, {"format": "int8_tensorwise"})), weight) < RIGHT["int8"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    "recipe", ["int8_tensorwise:scale=tensor", "float8_e4m3fn", "float8_e5m2"], ids=lambda recipe: recipe[:12]
)
def test_m01_tensor_scales_of_any_shape(tmp_path, weight, shape, recipe):
    tensors = stored(weight, recipe)
    tensors["weight_scale"] = tensors["weight_scale"].reshape(shape)
    marker = parse_recipe(recipe).marker()
    assert rel_err(weight_of(tmp_path, layer(tensors, marker)), weight) < 0.1


def test_m01_fp8_with_one_scale_per_row_asks_for_full_precision(tmp_path, weight):
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    tensors = {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}
    assert rel_err(weight_of(tmp_path, layer(tensors, {"format": "float8_e4m3fn"})), weight) < RIGHT["fp8"]
    with open_source(tmp_path / "canonical.safetensors") as source:
        assert read_quantized(source).layers["blocks.0.up"].recipe.full_precision


# ---- M03, A01, A09, M10: scales without a marker, legacy markers ---------------------------------------------------


@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("spelling", ["weight_scale", "scale_weight"])
def test_m03_a01_scales_without_any_marker_are_recognised(tmp_path, weight, recipe, spelling):
    tensors = stored(weight, recipe)
    tensors[spelling] = tensors.pop("weight_scale")
    assert rel_err(weight_of(tmp_path, layer(tensors)), weight) < 0.12
    assert describe(tmp_path / "odd.safetensors").layers[0].format == recipe


@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("marker_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float32])
@pytest.mark.parametrize("scale_input", [None, 1.0, 0.25])
def test_m10_a09_legacy_files_of_both_types_and_all_markers(
    tmp_path, weight, recipe, length, marker_dtype, scale_input
):
    tensors = stored(weight, recipe)
    tensors["scale_weight"] = tensors.pop("weight_scale")
    if scale_input is not None:
        tensors["scale_input"] = torch.tensor(scale_input)
    entries = {**layer(tensors), "scaled_fp8": torch.zeros(length).to(marker_dtype)}
    assert rel_err(weight_of(tmp_path, entries), weight) < 0.1
    (found,) = describe(tmp_path / "canonical.safetensors").layers
    assert found.format == recipe
    assert found.marker.get("full_precision_matrix_mult", False) == (length == 2)
    kept = load_file(tmp_path / "canonical.safetensors")
    assert ("blocks.0.up.input_scale" in kept) == (scale_input == 0.25)
    assert "scaled_fp8" not in kept


# ---- M04, M06, M07, M20, A03: rotations ---------------------------------------------------------------------------


def test_int8_codes_without_a_usable_marker_are_undecidable(tmp_path, weight):
    for marker in (None, torch.zeros(0, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)):
        message = refusal(tmp_path, layer(stored(weight, "int8_convrot"), marker))
        assert "undecidable" in message and "4, 16, 64, 256" in message
        assert "unquantized model as the original" in message


def test_int8_codes_without_a_marker_that_can_not_be_rotated_are_read(tmp_path, weight):
    assert rel_err(weight_of(tmp_path, layer(stored(weight, "int8_tensorwise:scale=tensor"))), weight) < 0.1
    narrow = weight[:, :254].contiguous()
    assert rel_err(weight_of(tmp_path, layer(stored(narrow, "int8_tensorwise"))), narrow) < RIGHT["int8"]


@pytest.mark.parametrize(
    ("recipe", "marker"),
    [
        ("int8_convrot", {"format": "int8_tensorwise"}),
        ("int8_convrot", {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}),
        ("int8_tensorwise:convrot=64", {"format": "int8_tensorwise", "convrot": True}),
        ("int8_tensorwise", {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}),
        ("convrot_w4a4:convrot=64", {"format": "convrot_w4a4"}),
        ("asym_w4a8_int8:convrot=64", {"format": "asym_w4a8_int8", "group_size": 16}),
    ],
    ids=["M04 no convrot", "M06 other group", "M07 group missing", "not rotated", "w4a4 group", "w4a8 group"],
)
@pytest.mark.parametrize("padded_name", ["", "model.diffusion_model."])
def test_m04_m06_m07_a03_a_wrong_rotation_is_settled_by_the_original(tmp_path, weight, recipe, marker, padded_name):
    save_file({padded_name + "blocks.0.up.weight": weight}, tmp_path / "original.safetensors")
    path = tmp_path / "odd.safetensors"
    save_file(layer(stored(weight, recipe), marker), path)
    report = repair(path, tmp_path / "fixed.safetensors", original=tmp_path / "original.safetensors")
    assert any("the original's weights say" in note for note in report.warnings)
    with open_source(tmp_path / "fixed.safetensors") as source:
        found = read_quantized(source).layers["blocks.0.up"].recipe
    assert found.convrot_groupsize == parse_recipe(recipe).convrot_groupsize
    dequantize(tmp_path / "fixed.safetensors", tmp_path / "float.safetensors")
    assert rel_err(load_file(tmp_path / "float.safetensors")["blocks.0.up.weight"], weight) < RIGHT["w4"]


def test_the_original_settles_what_has_no_marker(tmp_path, weight):
    save_file({"blocks.0.up.weight": weight}, tmp_path / "original.safetensors")
    for recipe in ("int8_convrot", "int8_tensorwise:convrot=16", "int8_tensorwise"):
        save_file(layer(stored(weight, recipe)), tmp_path / "odd.safetensors")
        repair(tmp_path / "odd.safetensors", tmp_path / "x.safetensors", original=tmp_path / "original.safetensors")
        assert describe(tmp_path / "x.safetensors").layers[0].marker == parse_recipe(recipe).marker()


def test_another_original_is_noticed(tmp_path, weight):
    save_file({"blocks.0.up.weight": torch.randn(N, K)}, tmp_path / "original.safetensors")
    save_file(
        layer(stored(weight, "int8_convrot"), parse_recipe("int8_convrot").marker()), tmp_path / "odd.safetensors"
    )
    with pytest.raises(QuantError, match="another model"):
        repair(tmp_path / "odd.safetensors", tmp_path / "x.safetensors", original=tmp_path / "original.safetensors")


def test_an_original_without_the_layers_is_another_model(tmp_path, weight):
    save_file({"other.weight": weight}, tmp_path / "original.safetensors")
    entries = layer(stored(weight, "int8_convrot"), parse_recipe("int8_convrot").marker())
    save_file(entries, tmp_path / "odd.safetensors")
    with pytest.raises(QuantError, match=r"none of the 1 quantized layers .*blocks\.0\.up.* another model"):
        repair(tmp_path / "odd.safetensors", tmp_path / "x.safetensors", original=tmp_path / "original.safetensors")
    save_file({"blocks.0.up.weight": weight}, tmp_path / "plain.safetensors")
    report = repair(
        tmp_path / "plain.safetensors", tmp_path / "x.safetensors", original=tmp_path / "original.safetensors"
    )
    assert any("no layer is quantized" in note for note in report.warnings)


@pytest.mark.parametrize(
    ("recipe", "suffix", "value", "word"),
    [
        ("int8_convrot", "weight_scale", float("nan"), "NaN or infinite"),
        ("int8_convrot", "weight_scale", -0.01, "negative"),
        ("float8_e4m3fn", "weight_scale", float("inf"), "NaN or infinite"),
        ("float8_e4m3fn", "weight_scale", -0.01, "negative"),
        ("nvfp4", "weight_scale", float("nan"), "NaN or infinite"),
        ("nvfp4", "weight_scale_2", -0.01, "negative"),
        ("mxfp8", "weight_scale", float("nan"), "NaN or infinite"),
    ],
)
@pytest.mark.parametrize("with_original", [False, True])
def test_repair_does_not_write_scales_that_are_no_scales(tmp_path, weight, recipe, suffix, value, word, with_original):
    entries = layer(stored(weight, recipe), parse_recipe(recipe).marker())
    key = f"blocks.0.up.{suffix}"
    broken = entries[key].float().reshape(-1)
    broken[0] = value
    entries[key] = broken.reshape(entries[key].shape).to(entries[key].dtype)
    save_file(entries, tmp_path / "odd.safetensors")
    save_file({"blocks.0.up.weight": weight}, tmp_path / "original.safetensors")
    given = {"original": tmp_path / "original.safetensors"} if with_original else {}
    with pytest.raises(QuantError) as caught:
        repair(tmp_path / "odd.safetensors", tmp_path / "x.safetensors", **given)
    assert not (tmp_path / "x.safetensors").exists()
    [problem] = caught.value.problems
    assert problem.layer == "blocks.0.up"
    assert (word in problem.message and suffix in problem.message) or with_original


def test_the_originals_agreement_changes_nothing(tmp_path, weight):
    save_file({"blocks.0.up.weight": weight}, tmp_path / "original.safetensors")
    for recipe in (
        "int8_convrot",
        "int8_tensorwise",
        "convrot_w4a4",
        "asym_w4a8_int8",
        "nvfp4",
        "mxfp8",
        "float8_e5m2",
    ):
        entries = layer(stored(weight, recipe), parse_recipe(recipe).marker())
        save_file(entries, tmp_path / "odd.safetensors")
        report = repair(
            tmp_path / "odd.safetensors", tmp_path / "x.safetensors", original=tmp_path / "original.safetensors"
        )
        assert report.warnings == []
        fixed = load_file(tmp_path / "x.safetensors")
        assert all(same_bytes(fixed[key], entries[key]) for key in entries)


def test_no_false_alarm_on_gaussian_weights(tmp_path, weight):
    for recipe in ("int8_convrot", "int8_tensorwise"):
        save_file(layer(stored(weight, recipe), parse_recipe(recipe).marker()), tmp_path / "fine.safetensors")
        info = describe(tmp_path / "fine.safetensors")
        assert not info.problems and not info.layers[0].notes


@pytest.mark.parametrize("group", [100, 128, 512, 3])
def test_m20_an_impossible_rotation_is_refused(tmp_path, weight, group):
    marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": group}
    assert "marker can't be right" in refusal(tmp_path, layer(stored(weight, "int8_convrot"), marker))


def test_m20_a_width_that_the_group_does_not_divide_is_refused(tmp_path):
    narrow = torch.randn(32, 96).to(torch.bfloat16)
    marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    assert "96" in refusal(tmp_path, layer(stored(narrow, "int8_tensorwise"), marker))


def test_a_rotation_without_row_scales_is_refused(tmp_path, weight):
    marker = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
    assert "one scale per row" in refusal(tmp_path, layer(stored(weight, "int8_tensorwise:scale=tensor"), marker))


# ---- M14, A05: empty and broken markers ----------------------------------------------------------------------------


@pytest.mark.parametrize("marker", [b"", b"\0", b"\0\0\0\0", b"  "], ids=repr)
def test_m14_a05_an_empty_marker_means_not_quantized(tmp_path, weight, marker):
    empty = torch.tensor(list(marker), dtype=torch.uint8)
    entries = {
        "embed.weight": weight,
        "embed.comfy_quant": empty,
        **layer({"weight": weight.clone()}, empty.clone()),
        **layer(stored(weight, "float8_e4m3fn"), empty.clone(), name="blocks.0.fp8"),
    }
    save_file(entries, tmp_path / "odd.safetensors")
    dequantize(tmp_path / "odd.safetensors", tmp_path / "float.safetensors")
    restored = load_file(tmp_path / "float.safetensors")
    assert set(restored) == {"embed.weight", "blocks.0.up.weight", "blocks.0.fp8.weight"}
    assert torch.equal(restored["embed.weight"], weight)
    assert rel_err(restored["blocks.0.fp8.weight"], weight) < RIGHT["fp8"]


@pytest.mark.parametrize(
    ("marker", "message"),
    [(b"{oops", "not JSON"), (b"[1]", "expected an object"), (b"\xff\xfe", "not JSON"), (b"{" * 5000, "not JSON")],
)
def test_a_broken_marker_is_refused(tmp_path, weight, marker, message):
    raw = torch.tensor(list(marker), dtype=torch.uint8)
    assert message in refusal(tmp_path, layer(stored(weight, "float8_e4m3fn"), raw))


def test_an_oversized_marker_is_refused_unread(tmp_path, weight):
    raw = torch.zeros(10_000_000, dtype=torch.uint8)
    assert "a marker is a few dozen" in refusal(tmp_path, layer(stored(weight, "float8_e4m3fn"), raw))


def test_a_marker_padded_with_nuls_is_read(tmp_path, weight):
    raw = torch.cat([encode_marker({"format": "float8_e4m3fn"}), torch.zeros(5, dtype=torch.uint8)])
    assert rel_err(weight_of(tmp_path, layer(stored(weight, "float8_e4m3fn"), raw)), weight) < RIGHT["fp8"]


@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "nvfp4", "mxfp8", "int8_convrot", "asym_w4a8_int8"])
def test_a_marker_without_a_format_leaves_it_to_the_tensors(tmp_path, weight, recipe):
    marker = parse_recipe(recipe).marker()
    del marker["format"]
    marker["full_precision_matrix_mult"] = True
    assert rel_err(weight_of(tmp_path, layer(stored(weight, recipe), marker)), weight) < 0.12


# ---- M17, M19, M21: parts that are missing or contradict each other ------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ["int8_tensorwise", "float8_e4m3fn", "nvfp4", "mxfp8", "convrot_w4a4", "asym_w4a8_int8"]
)
def test_m17_a_missing_side_tensor_is_named(tmp_path, weight, recipe):
    tensors = stored(weight, recipe)
    for suffix in [suffix for suffix in tensors if suffix not in ("weight", "weight_codebook")]:
        rest = {key: value for key, value in tensors.items() if key != suffix}
        if recipe == "nvfp4" and suffix == "weight_scale_2":
            assert "no ComfyUI format" in refusal(tmp_path, layer(rest, parse_recipe(recipe).marker()))
        else:
            assert f"{suffix} is missing" in refusal(tmp_path, layer(rest, parse_recipe(recipe).marker()))


def test_a_marker_without_a_weight_is_damaged(tmp_path, weight):
    assert "no weight" in refusal(tmp_path, layer({"bias": weight[0]}, {"format": "float8_e4m3fn"}))


@pytest.mark.parametrize("length", [2, N - 1, N + 1, K, 2 * N])
@pytest.mark.parametrize("recipe", ["int8_tensorwise", "convrot_w4a4", "float8_e4m3fn"])
def test_m19_a_scale_of_the_wrong_length_is_refused(tmp_path, weight, length, recipe):
    tensors = {**stored(weight, recipe), "weight_scale": torch.ones(length)}
    assert f"{length} elements" in refusal(tmp_path, layer(tensors, parse_recipe(recipe).marker()))


def test_block_scales_of_the_wrong_shape_are_refused(tmp_path, weight):
    for recipe in ("nvfp4", "mxfp8"):
        tensors = stored(weight, recipe)
        tensors["weight_scale"] = tensors["weight_scale"][:, :-4].contiguous()
        assert "fit" in refusal(tmp_path, layer(tensors, parse_recipe(recipe).marker()))


@pytest.mark.parametrize("said", ["float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4", "int8_tensorwise"])
@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4", "asym_w4a8_int8"])
def test_m21_tensors_that_contradict_the_marker_are_read_as_what_they_are(tmp_path, weight, said, recipe):
    if recipe == "asym_w4a8_int8":
        message = refusal_or_weight(tmp_path, layer(stored(weight, recipe), {"format": said}))
        assert isinstance(message, torch.Tensor) and rel_err(message, weight) < 0.1
        return
    assert rel_err(weight_of(tmp_path, layer(stored(weight, recipe), {"format": said})), weight) < 0.12


def refusal_or_weight(tmp_path, entries):
    try:
        return weight_of(tmp_path, entries)
    except QuantError as error:
        return str(error)


@pytest.mark.parametrize("said", ["float8_e4m3fn", "nvfp4", "mxfp8"])
def test_m21_int8_codes_under_a_float_marker_are_undecidable_unless_a_rotation_is_impossible(tmp_path, weight, said):
    assert "undecidable" in refusal(tmp_path, layer(stored(weight, "int8_convrot"), {"format": said}))
    tensors = stored(weight, "int8_tensorwise:scale=tensor")
    assert rel_err(weight_of(tmp_path, layer(tensors, {"format": said})), weight) < 0.1


def test_a_float_weight_with_a_claimed_scale_is_undecidable(tmp_path, weight):
    tensors = {"weight": weight, "weight_scale": torch.tensor(0.5)}
    assert "still to be applied" in refusal(tmp_path, layer(tensors, {"format": "float8_e4m3fn"}))


def test_a_float_weight_with_a_stale_marker_is_a_float_weight(tmp_path, weight):
    save_file(layer({"weight": weight}, {"format": "float8_e4m3fn"}), tmp_path / "odd.safetensors")
    dequantize(tmp_path / "odd.safetensors", tmp_path / "float.safetensors")
    assert torch.equal(load_file(tmp_path / "float.safetensors")["blocks.0.up.weight"], weight)


# ---- M23, header metadata -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ['{"format_version": "1.0"}', '{"layers": [1]}', "[]", "{oops", '{"layers": {"a": 1}}']
)
def test_m23_a_header_entry_that_says_nothing_is_refused(tmp_path, weight, text):
    path = tmp_path / "odd.safetensors"
    save_file(layer(stored(weight, "float8_e4m3fn")), path, {"_quantization_metadata": text})
    with pytest.raises(QuantError, match="_quantization_metadata"):
        describe(path)


@pytest.mark.parametrize("in_file", ["", "model.diffusion_model."])
@pytest.mark.parametrize("in_header", ["", "model.diffusion_model."])
def test_header_entries_with_and_without_the_files_prefix(tmp_path, weight, in_file, in_header):
    tensors = stored(weight, "int8_convrot")
    claims = {f"{in_header}blocks.{index}.up": parse_recipe("int8_convrot").marker() for index in range(2)}
    entries = {}
    for index in range(2):
        copies = {suffix: tensor.clone() for suffix, tensor in tensors.items()}
        entries.update(layer(copies, name=f"{in_file}blocks.{index}.up"))
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": claims})}
    value = weight_of(tmp_path, entries, metadata, name=f"{in_file}blocks.1.up")
    assert rel_err(value, weight) < RIGHT["int8"]


def test_header_and_marker_that_contradict_each_other_are_refused(tmp_path, weight):
    claims = {"blocks.0.up": {"format": "int8_tensorwise"}}
    metadata = {"_quantization_metadata": json.dumps({"layers": claims})}
    entries = layer(stored(weight, "int8_convrot"), parse_recipe("int8_convrot").marker())
    assert "contradict each other" in refusal(tmp_path, entries, metadata)


# ---- M27 and other spellings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["int8_convrot", "int8_tensorwise:convrot=64", "convrot_w4a4:convrot=64"])
def test_m27_switches_under_params_are_read(tmp_path, weight, recipe):
    marker = parse_recipe(recipe).marker()
    nested = {"format": marker.pop("format"), "params": marker}
    assert rel_err(weight_of(tmp_path, layer(stored(weight, recipe), nested)), weight) < RIGHT["w4"]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
def test_block_scales_stored_as_bytes_are_read(tmp_path, weight, recipe):
    tensors = stored(weight, recipe)
    tensors["weight_scale"] = tensors["weight_scale"].view(torch.uint8)
    for marker in ({"format": recipe}, None):
        assert rel_err(weight_of(tmp_path, layer(tensors, marker)), weight) < 0.12


@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "float8_e5m2", "mxfp8"])
def test_float8_weights_stored_as_bytes_are_not_converted_by_value(tmp_path, weight, recipe):
    tensors = stored(weight, recipe)
    tensors["weight"] = tensors["weight"].view(torch.uint8)
    assert rel_err(weight_of(tmp_path, layer(tensors, {"format": recipe})), weight) < 0.1


def test_pre_quant_scale_is_folded_in_when_dequantizing(tmp_path, weight):
    factor = torch.linspace(0.5, 2, K).to(torch.bfloat16)
    tensors = {**stored(weight / factor, "nvfp4"), "pre_quant_scale": factor}
    save_file(layer(tensors, {"format": "nvfp4"}), tmp_path / "m.safetensors")
    dequantize(tmp_path / "m.safetensors", tmp_path / "float.safetensors")
    assert rel_err(load_file(tmp_path / "float.safetensors")["blocks.0.up.weight"], weight) < RIGHT["nvfp4"]


# ---- A11, A15, A19, A21 ----------------------------------------------------------------------------------------------


def test_a11_small_float8_tensors_never_reach_plain_arithmetic(tmp_path, weight):
    entries = {
        "norm.weight": torch.ones(K).to(torch.float8_e4m3fn),
        "table": torch.ones(2, K).to(torch.float8_e5m2),
        "lin.weight": weight.to(torch.float8_e4m3fn),
        "lin.bias": torch.ones(N).to(torch.float8_e4m3fn),
    }
    save_file(entries, tmp_path / "cast.safetensors")
    with open_source(tmp_path / "cast.safetensors") as source:
        state = canonical_state_dict(source)
    assert [state[key].dtype for key in ("norm.weight", "table", "lin.bias")] == [torch.bfloat16] * 3
    assert state["lin.weight"].dtype == torch.float8_e4m3fn
    module = torch.nn.ModuleDict({"lin": DequantizedOps.Linear(K, N), "norm": DequantizedOps.RMSNorm(K)})
    raw = {key: value for key, value in entries.items() if key != "table"}
    module.load_state_dict(raw, strict=True, assign=True)
    value = module["lin"](module["norm"](torch.ones(2, K)))
    assert value.dtype == torch.float32
    assert rel_err(value.detach(), weight.to(torch.float8_e4m3fn).float().sum(1).expand(2, N) + 1) < 1e-4


def test_a15_large_activations_survive_a_weight_only_float8_layer(tmp_path, weight):
    tensors = stored(weight, "float8_e4m3fn")
    marker = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    from nativedit.quant.ops import ComfyUIOps, QuantOps

    for ops in (ComfyUIOps, QuantOps):
        module = ops.Linear(K, N, bias=False, device="meta")
        module.load_state_dict(
            {key.removeprefix("x."): v for key, v in layer(tensors, marker, "x").items()}, assign=True
        )
        x = torch.full((1, K), 1000.0, dtype=torch.bfloat16)
        assert rel_err(module(x), x @ weight.T) < 0.1
        assert json.loads(bytes(module.state_dict()["comfy_quant"].tolist())) == marker


@pytest.mark.parametrize(
    ("tensors", "marker", "message"),
    [
        ({"weight_scale": torch.ones(2, 2)}, {"format": "int8_blockwise"}, "'int8_blockwise' is not one"),
        ({"weight_scale": torch.ones(2, 2)}, None, "one scale per block"),
        ({"weight_scale": torch.ones(2, 2)}, {"format": "int8_tensorwise"}, "one scale per block"),
        ({"weight_scale_inv": torch.ones(2, 2)}, None, "block-wise fp8"),
    ],
)
def test_a19_block_wise_files_are_named(tmp_path, weight, tensors, marker, message):
    codes = torch.zeros(N, K, dtype=torch.int8 if "inv" not in str(tensors.keys()) else torch.uint8)
    if "weight_scale_inv" in tensors:
        codes = codes.view(torch.float8_e4m3fn)
    assert message in refusal(tmp_path, layer({"weight": codes, **tensors}, marker))


def test_the_asymmetric_kind_that_comfyui_gets_wrong_is_refused(tmp_path, weight):
    tensors = {**stored(weight, "asym_w4a8_int8"), "weight_correction": torch.ones(16, N)}
    assert "weight_correction" in refusal(tmp_path, layer(tensors, parse_recipe("asym_w4a8_int8").marker()))


def test_a21_flags_survive_when_the_prefix_is_stripped(tmp_path, weight):
    marker = {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}
    save_file(layer(stored(weight, "float8_e4m3fn"), marker, "te.model.lin"), tmp_path / "te.safetensors")
    with open_source(tmp_path / "te.safetensors") as source:
        state = canonical_state_dict(source, prefix="te.model.")
    module = torch.nn.ModuleDict({"lin": DequantizedOps.Linear(K, N, bias=False, device="meta")})
    module.load_state_dict(state, strict=True, assign=True)
    assert module["lin"].quantization.marker() == marker


def test_a_file_of_another_size_is_refused_with_the_layers_name(weight):
    module = torch.nn.ModuleDict({"lin": DequantizedOps.Linear(K, N + 32, bias=False, device="meta")})
    entries = layer(stored(weight, "nvfp4"), {"format": "nvfp4"}, "lin")
    with pytest.raises(RuntimeError, match=r"'lin'.*holds \[128, 256\], this model needs \[160, 256\]"):
        module.load_state_dict(entries, assign=True)


def test_every_bad_layer_is_listed_at_once(tmp_path, weight):
    entries = {}
    for index in range(3):
        entries.update(layer(stored(weight, "int8_convrot"), name=f"blocks.{index}.up"))
    path = tmp_path / "odd.safetensors"
    save_file(entries, path)
    with pytest.raises(QuantError) as error:
        dequantize(path, tmp_path / "x.safetensors")
    assert [problem.layer for problem in error.value.problems] == ["blocks.0.up", "blocks.1.up", "blocks.2.up"]


def test_describing_a_quantized_file_of_40_gigabytes_reads_its_header_and_markers(tmp_path, weight):
    rows = 10**9 // K
    marker = bytes(encode_marker({"format": "float8_e4m3fn"}).tolist())
    header, position, small = {}, 0, {}
    for index in range(40):
        for suffix, dtype, shape, size in (
            ("weight", "F8_E4M3", [rows, K], rows * K),
            ("weight_scale", "F32", [], 4),
            ("comfy_quant", "U8", [len(marker)], len(marker)),
        ):
            name = f"blocks.{index}.up.{suffix}"
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
            if suffix == "comfy_quant":
                small[position] = marker
            position += size
    text = json.dumps(header).encode()
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
        for offset, data in small.items():
            file.seek(8 + len(text) + offset)
            file.write(data)
    with open_source(path) as source:
        read = []
        original = source._read
        source._read = lambda name, offset, count, into=None: (read.append(count), original(name, offset, count))[1]
        info = describe(source)
    assert path.stat().st_size > 39 * 10**9 and sum(read) == 40 * len(marker)
    assert info.counts == {"float8_e4m3fn": 40} and info.comfyui == "0.4.0"


@pytest.mark.parametrize(("scale", "dtype"), [(float("nan"), "bfloat16"), (1e30, "float16")])
def test_weights_that_come_out_infinite_or_nan_are_refused_when_dequantizing(tmp_path, weight, scale, dtype):
    tensors = stored(weight, "int8_convrot")
    tensors["weight_scale"] = tensors["weight_scale"] * scale
    target = tmp_path / "out.safetensors"
    entries = layer(tensors, {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256})
    save_file(entries, tmp_path / "odd.safetensors")
    with pytest.raises(QuantError, match=r"'blocks\.0\.up' has NaN or infinite weights"):
        dequantize(tmp_path / "odd.safetensors", target, dtype=dtype)
    assert not target.exists()
