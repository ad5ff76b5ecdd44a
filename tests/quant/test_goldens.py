"""Files that ComfyUI wrote: read, copied, dequantized, written again, multiplied with, down to the bit."""

from __future__ import annotations

import pytest
import torch
from quant_goldens import RECIPES, QuantGolden, quant_goldens, same_bytes
from safetensors.torch import load_file, save_file
from support import rel_err

from nativedit.files import open_source, write_safetensors
from nativedit.quant.convert import quantize
from nativedit.quant.dequantize import dequantize
from nativedit.quant.layer import canonical_tensors, dequantize_rows, dequantize_tensors
from nativedit.quant.markers import encode_marker
from nativedit.quant.ops import ComfyUIOps, DequantizedOps
from nativedit.quant.reader import canonical_state_dict, read_quantized
from nativedit.quant.repair import repair

pytestmark = pytest.mark.usefixtures("single_thread")

GOLDENS = quant_goldens()
goldens = pytest.mark.parametrize("golden", GOLDENS, ids=str)
# What ComfyUI itself reads wrongly has wrong numbers; see the test of its source weights.
RIGHT = [golden for golden in GOLDENS if not golden.misread_by_comfyui]
rightly_recorded = pytest.mark.parametrize("golden", RIGHT, ids=str)
with_products = pytest.mark.parametrize("golden", [g for g in RIGHT if not g.name.startswith("embedding")], ids=str)
written = pytest.mark.parametrize("golden", [golden for golden in GOLDENS if golden.name in RECIPES], ids=str)
# Rotations over 256 columns are undone by a product in fp32 (w4a8: in the output's dtype), whose sum runs in another
# order on another CPU. Recorded and ours then differ by the rounding of that sum, relative to the largest weight.
SUM_ROUNDING = 2e-6


def exact_sum(layer) -> bool:
    return layer.recipe.convrot_groupsize != 256


def agrees(value: torch.Tensor, recorded: torch.Tensor, exact: bool) -> bool:
    if exact:
        return torch.equal(value, recorded)
    step = recorded.abs() * torch.finfo(recorded.dtype).eps + SUM_ROUNDING * recorded.abs().max()
    return bool(((value.double() - recorded.double()).abs() <= step).all())


@goldens
def test_every_layer_is_recognised_with_the_marker_that_comfyui_wrote(golden):
    with open_source(golden.path) as source:
        found = read_quantized(source)
        assert not found.problems and not found.conflicts
        expected = {golden.prefix + key.removesuffix(".weight") for key in golden.group("dequant")}
        markers = {key.removesuffix(".comfy_quant") for key in source if key.endswith(".comfy_quant")}
        if golden.converted.exists():
            assert set(found.layers) == expected
        else:
            assert set(found.layers) == markers
        for name in markers:
            stored = source.read(f"{name}.comfy_quant")
            assert torch.equal(encode_marker(found.layers[name].marker()), stored)
            assert found.layers[name].notes == ()


@goldens
def test_copies_byte_for_byte(golden, tmp_path):
    with open_source(golden.path) as source:
        write_safetensors(tmp_path / "copy.safetensors", {name: source.read(name) for name in source}, source.metadata)
    copied, original = (tmp_path / "copy.safetensors").read_bytes(), golden.path.read_bytes()
    if copied != original:  # the order of two entries of __metadata__ is not defined
        with open_source(tmp_path / "copy.safetensors") as copy, open_source(golden.path) as source:
            assert copy.parts[0].tensors == source.parts[0].tensors and copy.metadata == source.metadata
            assert copied[copy.parts[0].data_start :] == original[source.parts[0].data_start :]


@rightly_recorded
def test_dequantizes_to_the_recorded_weights(golden):
    with open_source(golden.path) as source:
        for layer in read_quantized(source).layers.values():
            name = layer.name.removeprefix(golden.prefix)
            recorded = golden.expect[f"dequant.{name}.weight"]
            exact = exact_sum(layer) or layer.recipe.format != "int8_tensorwise"
            tensors = canonical_tensors(source, layer)
            whole = dequantize_tensors(tensors, layer.recipe, tuple(recorded.shape), torch.bfloat16)
            assert agrees(whole, recorded, exact), name
            for key, rows in golden.group(f"dequant_f32.{name}.weight").items():
                count = int(key.removeprefix("rows_0_"))
                wide = dequantize_tensors(tensors, layer.recipe, tuple(recorded.shape), torch.float32)[:count]
                assert agrees(wide, rows, exact_sum(layer)), name


@goldens
def test_rows_read_alone_are_the_rows_of_the_whole(golden):
    with open_source(golden.path) as source:
        for layer in read_quantized(source).layers.values():
            tensors = canonical_tensors(source, layer)
            whole = dequantize_tensors(tensors, layer.recipe, layer.shape, torch.bfloat16)
            experts = range(layer.shape[0]) if len(layer.shape) == 3 else [None]
            for expert in experts:
                matrix = whole if expert is None else whole[expert]
                for start in range(0, layer.shape[-2], 128):
                    stop = min(start + 128, layer.shape[-2])
                    rows = dequantize_rows(source, layer, start, stop, torch.bfloat16, expert=expert)
                    assert agrees(rows, matrix[start:stop], exact_sum(layer))


def test_a_rotated_expert_bank_is_read_rightly_where_comfyui_is_wrong():
    golden = next((golden for golden in GOLDENS if golden.misread_by_comfyui), None)
    if golden is None:
        pytest.skip("needs ../shared")
    with open_source(golden.path) as source:
        (layer,) = read_quantized(source).layers.values()
        weight = dequantize_tensors(canonical_tensors(source, layer), layer.recipe, layer.shape, torch.float32)
    assert rel_err(weight, golden.expect["source.experts.weight"]) < 0.01
    assert rel_err(golden.expect["dequant.experts.weight"], golden.expect["source.experts.weight"]) > 1


def float_source(golden: QuantGolden, path) -> dict[str, torch.Tensor]:
    tensors = golden.group("source")
    save_file(tensors, path, {"format": "pt"})
    return tensors


@written
def test_quantizing_the_source_gives_comfyuis_own_bytes(golden, tmp_path):
    source = float_source(golden, tmp_path / "float.safetensors")
    recipe, fast = RECIPES[golden.name]
    report = quantize(
        tmp_path / "float.safetensors",
        tmp_path / "ours.safetensors",
        format=recipe,
        include=["*"],
        fast_matmul=fast,
        device="cpu",
    )
    ours, theirs = load_file(tmp_path / "ours.safetensors"), load_file(golden.path)
    theirs = {key: value for key, value in theirs.items() if key in source or not key.startswith("norm")}
    assert set(ours) == set(theirs)
    assert [key for key in theirs if not same_bytes(ours[key], theirs[key])] == []
    assert {decision.layer for decision in report.quantized} == {
        key.removesuffix(".comfy_quant") for key in theirs if key.endswith(".comfy_quant")
    }


@written
def test_dequantizing_what_we_wrote_restores_names_and_shapes(golden, tmp_path):
    source = float_source(golden, tmp_path / "float.safetensors")
    recipe, fast = RECIPES[golden.name]
    quantize(
        tmp_path / "float.safetensors",
        tmp_path / "ours.safetensors",
        format=recipe,
        include=["*"],
        fast_matmul=fast,
        device="cpu",
    )
    report = dequantize(tmp_path / "ours.safetensors", tmp_path / "back.safetensors")
    back = load_file(tmp_path / "back.safetensors")
    assert {key: value.shape for key, value in back.items()} == {key: value.shape for key, value in source.items()}
    assert report.warnings == []  # our record tells how far nvfp4 and mxfp8 padded
    for key, recorded in golden.group("dequant").items():
        assert agrees(back[key], recorded, "convrot" not in recipe), key


def chained(ops, golden: QuantGolden, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module tree with the golden's layers, built on the meta device."""
    root = torch.nn.Module()

    def attach(name: str, layer: torch.nn.Module) -> None:
        *path, last = name.split(".")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, layer)

    shapes = {key.removesuffix(".weight"): tuple(value.shape) for key, value in golden.group("dequant").items()}
    for key in ("blocks.0.odd.weight",):
        if key in golden.group("source"):
            shapes.setdefault(key.removesuffix(".weight"), tuple(golden.group("source")[key].shape))
    for name, shape in shapes.items():
        bias = f"{name}.bias" in state
        if len(shape) == 3:
            attach(name, ops.MoEExperts(shape[0], shape[2], shape[1], bias=bias, device="meta"))
        elif name == "embed_tokens":
            attach(name, ops.Embedding(*shape, device="meta"))
        else:
            attach(name, ops.Linear(shape[1], shape[0], bias=bias, device="meta"))
    if "norm.weight" in state:
        attach("norm", ops.RMSNorm(256, device="meta"))
    root.load_state_dict(state, strict=True, assign=True)
    return root


def loaded(ops, golden: QuantGolden) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    with open_source(golden.path) as source:
        state = canonical_state_dict(source, prefix=golden.prefix)
    return chained(ops, golden, dict(state)), state


@goldens
@pytest.mark.parametrize("assign", [True, False])
def test_modules_load_strictly_and_give_the_same_entries_back(golden, assign):
    module, state = loaded(DequantizedOps, golden)
    saved = module.state_dict()
    assert set(saved) == set(state)
    assert [key for key in state if not same_bytes(saved[key], state[key])] == []
    if not assign:
        fresh = chained(DequantizedOps, golden, dict(state))
        fresh.load_state_dict(saved, strict=True)
        assert all(same_bytes(fresh.state_dict()[key], state[key]) for key in state)


@with_products
@torch.no_grad()
def test_full_precision_products_match(golden):
    module, _ = loaded(DequantizedOps, golden)
    for name, recorded in golden.group("y_fullprec").items():
        if golden.is_bank:
            value = module.experts.expert_linear(golden.expect["x"], int(name))
        else:
            layer = module.get_submodule(name)
            value = layer(golden.expect[f"x.{layer.in_features}"])
        # The product itself is a sum over K: bf16 results on another CPU are off by a unit in the last place at most.
        assert rel_err(value, recorded) < 5e-4, name


@with_products
@torch.no_grad()
def test_products_in_the_format_match_comfyuis(golden):
    module, _ = loaded(ComfyUIOps, golden)
    if golden.is_bank:
        for index in range(3):
            value = module.experts.expert_linear(golden.expect["x"], index)
            assert rel_err(value, golden.expect[f"y_default.{index}"]) < 1e-3
        return
    for name, recorded in golden.group("y_quant").items():
        layer = module.get_submodule(name)
        if layer.quantization.recipe.format not in ("int8_tensorwise", "asym_w4a8_int8", "convrot_w4a4"):
            continue  # float formats have no such product on a CPU; the recording emulates one
        limit = 0.01 if layer.quantization.recipe.format == "convrot_w4a4" else 1e-4
        assert rel_err(layer(golden.expect[f"x.{layer.in_features}"]), recorded) < limit, name


@pytest.mark.parametrize("golden", [g for g in GOLDENS if g.name.startswith("embedding")], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_embeddings_give_comfyuis_rows(golden, kind):
    module, _ = loaded(ComfyUIOps, golden)
    ids = golden.expect["ids"].to(kind)
    exact = not golden.name.endswith("convrot256")
    assert agrees(module.embed_tokens(ids), golden.expect["rows"], exact)
    wide = module.embed_tokens(ids, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    limit = 0 if exact else 1e-5
    assert rel_err(wide, golden.expect["rows_out_f32"]) <= limit


@pytest.mark.parametrize("golden", [g for g in GOLDENS if g.converted.exists()], ids=str)
def test_repair_of_older_dialects_gives_comfyuis_own_conversion(golden, tmp_path):
    repair(golden.path, tmp_path / "ours.safetensors")
    ours, theirs = load_file(tmp_path / "ours.safetensors"), load_file(golden.converted)
    assert set(ours) == set(theirs)
    assert [key for key in theirs if not same_bytes(ours[key], theirs[key])] == []


@pytest.mark.parametrize("golden", [g for g in GOLDENS if not g.converted.exists()], ids=str)
def test_repair_leaves_a_canonical_file_as_it_is(golden, tmp_path):
    report = repair(golden.path, tmp_path / "ours.safetensors")
    assert report.warnings == []
    ours, theirs = load_file(tmp_path / "ours.safetensors"), load_file(golden.path)
    assert set(ours) == set(theirs) and all(same_bytes(ours[key], theirs[key]) for key in theirs)
