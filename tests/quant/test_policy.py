"""Which layers are quantized, and the reasons given."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch
from safetensors.torch import save_file

from nativedit.quant.convert import quantize
from nativedit.quant.describe import describe
from nativedit.quant.errors import QuantError
from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.policy import CardPolicy, Policy, block_stacks, decide, read_policy

INT8 = parse_recipe("int8_convrot")


def decisions(shapes, policy=None, **keywords):
    policy = policy or Policy(INT8, **keywords)
    tensors = {key: ("BF16", tuple(shape), 2 * math.prod(shape)) for key, shape in shapes.items()}
    return {decision.layer: decision for decision in decide(tensors, policy)}


def layout(shared, name):
    return json.loads((shared / "reference" / "layouts" / f"{name}.comfy.json").read_text())["keys"]


EXPECTED = {
    # Every attention and MLP Linear of the repeated blocks, counted from the layouts by hand.
    "qwen_image": 60 * 12,
    "flux_dev": 19 * 8 + 38 * 2,
    "wan21_t2v_14b": 40 * 10,
    "sd35_large": 38 * 5 + 37 * 3,
    "chroma": 19 * 8 + 38 * 2,
    "lumina2": 30 * 5,
    "z_image": 34 * 5,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_unknown_models_have_the_linears_of_their_blocks_quantized_and_nothing_else(shared, name):
    found = decisions(layout(shared, name))
    quantized = [decision for decision in found.values() if decision.recipe is not None]
    assert len(quantized) == EXPECTED[name]
    assert all(decision.why for decision in found.values())


def test_a_width_that_256_does_not_divide_is_rotated_over_64_columns():
    shapes = {f"blocks.{i}.{name}.weight": (2240, 2240) for i in range(2) for name in "ab"}
    for name in ("int8_convrot", "convrot_w4a4", "asym_w4a8_int8"):
        found = decisions(shapes, Policy(parse_recipe(name)))["blocks.0.a"]
        assert found.recipe.convrot_groupsize == 64
        assert "because 2240 input features can't be divided by the rotation's group 256" in found.why


def test_blocks_are_found_by_structure_not_by_name():
    shapes = {}
    for index in range(3):
        shapes[f"strange.{index}.q.weight"] = shapes[f"strange.{index}.o.weight"] = (2048, 2048)
        shapes[f"steps.{index}.weight"] = (2048, 2048)
        shapes[f"proj.{index}.linear.weight"] = (2048, 2048)
    assert block_stacks(shapes) == {"strange": [0, 1, 2]}


def test_a23_an_unknown_model_of_odd_widths_gives_its_reasons():
    shapes = {
        "patchify.weight": (2048, 96),
        "time.0.weight": (2048, 256),
        "final.weight": (64, 2048),
        "net.blocks.0.modulation.weight": (12288, 2048),
        "net.blocks.0.norm1.weight": (2048,),
        "net.blocks.0.small.weight": (8, 32),
        "net.blocks.0.odd.weight": (20000, 96),
        "net.blocks.0.mlp.weight": (8192, 2048),
        "net.blocks.0.conv.weight": (512, 512, 3, 3),
        "net.blocks.0.stack.weight": (8, 1024, 1024),
    }
    found = decisions(shapes)
    assert [layer for layer, decision in found.items() if decision.recipe] == ["net.blocks.0.mlp"]
    why = {layer.split(".")[-1]: decision.why for layer, decision in found.items()}
    assert "outside the repeated blocks" in why["patchify"] and "outside" in why["final"]
    assert why["modulation"] == "modulation" and "256 weights" in why["small"]
    assert "96 input features can't be divided by the rotation's group 256" in why["odd"]
    assert "convolution" in why["conv"] and "3-D weight" in why["stack"]
    assert "norm1" not in why


BLOCKS = {f"blocks.{index}.{name}.weight": (2048, 2048) for index in range(4) for name in ("attn.q", "mlp.up")}


def test_keep_edges_keeps_the_first_and_last_blocks_of_every_stack():
    found = decisions(BLOCKS, keep_edges=1)
    assert sorted(layer for layer, decision in found.items() if decision.recipe) == [
        "blocks.1.attn.q",
        "blocks.1.mlp.up",
        "blocks.2.attn.q",
        "blocks.2.mlp.up",
    ]
    assert "first or last 1 of 'blocks'" in found["blocks.3.mlp.up"].why


def test_include_and_exclude_win_over_the_rules_and_must_match_something():
    shapes = {**BLOCKS, "img_in.weight": (2048, 256)}
    found = decisions(shapes, include=("img_in",), exclude=("*.mlp.up",))
    assert found["img_in"].recipe and not found["blocks.0.mlp.up"].recipe
    assert found["blocks.0.mlp.up"].why == "excluded by '*.mlp.up'"
    with pytest.raises(ValueError, match=r"'blocks\.9\.\*' matches no layer"):
        decisions(shapes, include=("blocks.9.*",))


def test_patterns_hold_with_and_without_the_files_prefix():
    shapes = {f"model.diffusion_model.{key}": shape for key, shape in BLOCKS.items()}
    found = decisions(shapes, exclude=("blocks.0.*",))
    assert not found["model.diffusion_model.blocks.0.attn.q"].recipe
    assert found["model.diffusion_model.blocks.1.attn.q"].recipe


def test_a_policy_file_gives_layers_their_formats(tmp_path):
    (tmp_path / "p.toml").write_text(
        """
        format = "nvfp4"
        keep_edges = 1
        [[layers]]
        match = "blocks.*.attn.*"
        format = "int8_convrot"
        [[layers]]
        match = "blocks.2.*"
        format = "keep"
        """
    )
    chosen = read_policy(tmp_path / "p.toml")
    assert chosen.format == "nvfp4" and chosen.keep_edges == 1 and chosen.name == "p.toml"
    found = decisions(BLOCKS, Policy(parse_recipe("nvfp4"), rules=chosen.rules))
    assert found["blocks.1.attn.q"].recipe == INT8 and found["blocks.1.attn.q"].why == "rule 'blocks.*.attn.*'"
    assert found["blocks.1.mlp.up"].recipe.format == "nvfp4"
    assert found["blocks.2.mlp.up"].recipe is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("formt = 1", "unknown key 'formt'"),
        ("[[layers]]\nmatch = 'a'", "needs match and format"),
        ("[[layers]]\nmatch = 'a'\nformat = 'int5'", "unknown quantization format 'int5'"),
        ("= =", "not valid TOML"),
        ("format = 3", "format = 3 is not possible; expected a text"),
        ("keep_edges = -1", "keep_edges = -1 is not possible; expected a whole number"),
        ("keep_edges = true", "keep_edges = True is not possible"),
        ("max_error = 'x'", "max_error = 'x' is not possible; expected a number"),
        ("max_error = nan", "max_error = nan is not possible"),
        ("formats = 3", "formats = 3 is not possible"),
        ("layers = 3", r"layers = 3 is not possible; expected \[\[layers\]\] tables"),
        ("[[layers]]\nmatch = [1]\nformat = 'keep'", "match is a text or a list of texts"),
    ],
)
def test_a_policy_file_with_a_mistake_says_so(tmp_path, text, message):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_policy(tmp_path / "p.toml")


def test_a_policy_file_that_is_no_text_says_so(tmp_path):
    (tmp_path / "p.toml").write_bytes(b"\x00\xff")
    with pytest.raises(ValueError, match=r"p\.toml is not valid TOML"):
        read_policy(tmp_path / "p.toml")


def test_one_pattern_needs_no_list(tmp_path):
    (tmp_path / "p.toml").write_text("exclude = 'blocks.0.*'\nformats = 'nvfp4'")
    found = read_policy(tmp_path / "p.toml")
    assert found.exclude == ("blocks.0.*",) and found.formats == ("nvfp4",)


@pytest.mark.parametrize(
    "text", ["int5", "int8_tensorwise:scale=block", "nvfp4:convrot=64", "convrot_w4a4:convrot=128", "mxfp8:x"]
)
def test_formats_and_switches_that_do_not_exist_are_refused(text):
    with pytest.raises(ValueError, match=r"unknown|not possible|does not apply|can't read"):
        parse_recipe(text)


def test_recipes_read_what_they_print():
    for name in [*FORMATS, "int8_convrot", "int8_tensorwise:scale=tensor", "convrot_w4a4:convrot=64,linear=int8"]:
        recipe = parse_recipe(name)
        assert parse_recipe(str(recipe)) == recipe


def test_a_card_decides_before_the_generic_rules():
    card = CardPolicy(
        blocks=("blocks.*",),
        never=(("blocks.*.mlp.*", "its outputs are too large"),),
        banks=("experts",),
        min_weights=0,
    )
    shapes = {**BLOCKS, "experts.weight": (4, 64, 256), "img_in.weight": (2048, 256)}
    found = decisions(shapes, Policy(parse_recipe("mxfp8"), card=card))
    assert found["blocks.0.attn.q"].why == "card: 'blocks.*'"
    assert found["blocks.0.mlp.up"].why == "its outputs are too large"
    assert found["experts"].kind == "bank" and found["experts"].recipe
    assert found["img_in"].why == "not among the layers that the card quantizes"


def test_formats_that_comfyui_has_no_module_for_are_kept():
    card = CardPolicy(blocks=("*",), banks=("experts",), embeddings=("emb",), min_weights=0)
    shapes = {"experts.weight": (4, 64, 256), "emb.weight": (64, 256)}
    for name, bank, embedding in (
        ("asym_w4a8_int8", "no bank", "no embedding"),
        ("int8_convrot", "rotation of int8 expert banks", ""),
        ("nvfp4", "", "no embedding"),
    ):
        found = decisions(shapes, Policy(parse_recipe(name), card=card))
        assert bank in found["experts"].why and bool(found["experts"].recipe) == (not bank)
        assert embedding in found["emb"].why and bool(found["emb"].recipe) == (not embedding)


def write(path, shapes):
    save_file({key: torch.randn(*shape).to(torch.bfloat16) for key, shape in shapes.items()}, path)


SMALL = {f"blocks.{index}.{name}.weight": (128, 256) for index in range(3) for name in ("attn.q", "mlp.up")}


def test_a07_layers_whose_packed_width_detection_reads_are_kept(tmp_path):
    write(tmp_path / "m.safetensors", SMALL)

    def detect(shapes):
        return {"width": shapes["blocks.0.mlp.up.weight"][1], "blocks": 3}

    report = quantize(
        tmp_path / "m.safetensors",
        tmp_path / "q.safetensors",
        format="nvfp4",
        policy={"min_weights": 0},
        detect=detect,
        device="cpu",
    )
    (kept,) = report.kept
    assert kept.layer == "blocks.0.mlp.up" and "detection reads its width" in kept.why
    info = describe(tmp_path / "q.safetensors")
    assert detect(info.shapes) == {"width": 256, "blocks": 3} and len(info.layers) == 5


def test_a_result_that_would_be_taken_for_another_model_is_refused(tmp_path):
    write(tmp_path / "m.safetensors", SMALL)

    def detect(shapes):
        return sum(shape[1] for shape in shapes.values()) > 1000  # no single layer changes it, all together do

    with pytest.raises(QuantError, match="not be recognised"):
        quantize(
            tmp_path / "m.safetensors",
            tmp_path / "q.safetensors",
            format="nvfp4",
            policy={"min_weights": 0},
            detect=detect,
            device="cpu",
        )


def test_an_error_budget_keeps_the_layers_that_suffer(tmp_path):
    tensors = {key: torch.randn(128, 256).to(torch.bfloat16) for key in SMALL}
    save_file(tensors, tmp_path / "m.safetensors")
    report = quantize(
        tmp_path / "m.safetensors",
        tmp_path / "q.safetensors",
        format="convrot_w4a4",
        policy={"min_weights": 0, "max_error": 0.15, "layers": [{"match": "blocks.2.*", "format": "int8_tensorwise"}]},
        dry_run=True,
        device="cpu",
    )
    assert {decision.layer for decision in report.quantized} >= {
        "blocks.2.attn.q",
        "blocks.2.mlp.up",
        "blocks.0.attn.q",
    }
    strict = quantize(
        tmp_path / "m.safetensors",
        tmp_path / "q.safetensors",
        format="convrot_w4a4",
        policy={"min_weights": 0, "max_error": 0.05, "layers": [{"match": "blocks.2.*", "format": "int8_tensorwise"}]},
        dry_run=True,
        device="cpu",
    )
    assert {decision.layer for decision in strict.quantized} == {"blocks.2.attn.q", "blocks.2.mlp.up"}
    assert all("the limit is 0.050" in decision.why for decision in strict.kept)


def test_a_real_policy_run_names_the_format_that_is_missing(tmp_path):
    write(tmp_path / "m.safetensors", SMALL)
    with pytest.raises(ValueError, match="name a format: float8_e4m3fn"):
        quantize(tmp_path / "m.safetensors", tmp_path / "q.safetensors")


@pytest.mark.parametrize("missing", ["module", "layout"])
def test_a13_a_missing_comfy_kitchen_is_named_where_it_is_needed(tmp_path, monkeypatch, missing):
    write(tmp_path / "m.safetensors", SMALL)
    if missing == "module":
        monkeypatch.setitem(__import__("sys").modules, "comfy_kitchen", None)
    else:
        monkeypatch.setattr("comfy_kitchen.tensor.TensorCoreMXFP8Layout", None)
    with pytest.raises(ImportError, match=r"mxfp8 needs|which the format mxfp8"):
        quantize(tmp_path / "m.safetensors", tmp_path / "q.safetensors", format="mxfp8")
    describe(tmp_path / "m.safetensors")


def test_a_header_of_many_layers_is_decided_quickly():
    names = [f"blocks.{index}.{name}.weight" for index in range(300) for name in "abcdefgh"]
    tensors = {name: ("BF16", (1024, 1024), 2 << 20) for name in names}
    started = time.process_time()
    assert len(decide(tensors, Policy(INT8, exclude=("blocks.0.*",)))) == 2400
    assert time.process_time() - started < 2
