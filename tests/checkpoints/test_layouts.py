"""Key layouts of models that ComfyUI's core has, at full size: whose a file is, and both directions of every map."""

from __future__ import annotations

import json
import os
import re

import key_layouts
import pytest
from key_layouts import CARDS, layout, written

from nativedit.supported_models import architectures, find_architecture, get_architecture

rows = pytest.mark.parametrize("row", list(CARDS))
PREFIXES = ("", "model.diffusion_model.", "diffusion_model.", "transformer.", "net.")


def card_of(name: str) -> str | None:
    """The second diffusers class of a model (connectors, a text conditioner) is no diffusion model of ours."""
    row, side = name.split(".", 1)
    return None if side.startswith("diffusers_") else CARDS.get(row)


@pytest.mark.parametrize("name", key_layouts.names())
def test_every_layout_is_its_own_card_and_no_other(name):
    shapes = layout(name)
    for prefix in PREFIXES:
        match = find_architecture({prefix + key: shape for key, shape in shapes.items()})
        assert (match and match.architecture.name) == card_of(name), prefix
        assert match is None or match.prefix == prefix


def test_the_copies_in_the_repository_are_the_recorded_layouts(shared):
    for name in key_layouts.names():
        recorded = json.loads((shared / "reference/layouts" / f"{name}.json").read_text(encoding="utf-8"))["keys"]
        assert layout(name) == {key: tuple(shape) for key, shape in recorded.items()}, name


@rows
def test_diffusers_keys_become_comfyuis_exactly(row):
    two_way = get_architecture(CARDS[row]).two_way
    theirs = layout(f"{row}.diffusers")
    assert two_way.problems_theirs(theirs) == ([], [])
    buffers = {key: written(row)[key] for key in two_way.computed if key in written(row)}
    assert two_way.shapes(theirs) | buffers == written(row)


@rows
def test_comfyuis_keys_become_diffusers_exactly_in_either_spelling(row):
    two_way = get_architecture(CARDS[row]).two_way
    for ours in (layout(f"{row}.comfy"), written(row)):
        assert two_way.problems_ours(ours) == ([], [])
        assert {target.name: target.shape for target in two_way.to_theirs(ours)} == layout(f"{row}.diffusers")


@rows
def test_both_layouts_give_one_configuration_that_builds_the_diffusers_class(row):
    diffusers = pytest.importorskip("diffusers")
    torch = pytest.importorskip("torch")
    card = get_architecture(CARDS[row])
    config = find_architecture(layout(f"{row}.diffusers")).config
    ours = find_architecture(layout(f"{row}.comfy")).config
    assert {key: value for key, value in ours.items() if key != "rope_freq_dim"} == config
    with torch.device("meta"):
        module = getattr(diffusers, card.diffusers_class)(**ours)
    assert {key: tuple(value.shape) for key, value in module.state_dict().items()} == layout(f"{row}.diffusers")


# ---- the exceptions, one by one ------------------------------------------------------------------------------------


def test_the_norms_of_the_flux_family_are_written_as_scale():
    for row, key in (
        ("flux_dev", "double_blocks.18.txt_attn.norm.key_norm"),
        ("flux2_klein_4b", "single_blocks.19.norm.query_norm"),
        ("chroma", "distilled_guidance_layer.norms.4"),
    ):
        two_way = get_architecture(CARDS[row]).two_way
        assert two_way.spelled(f"{key}.weight") == f"{key}.scale" == two_way.spelled(f"{key}.scale")
        assert f"{key}.scale" in two_way.shapes(layout(f"{row}.diffusers"))


def test_other_layers_keep_their_weight():
    assert get_architecture("flux").two_way.spelled("final_layer.linear.weight") == "final_layer.linear.weight"
    assert get_architecture("wan").two_way.spelled("blocks.0.norm3.weight") == "blocks.0.norm3.weight"


def test_krea_2_calls_its_norms_scale_itself_and_folds_its_modulation():
    ours = get_architecture("krea2").two_way.shapes(layout("krea2.diffusers"))
    assert ours["blocks.27.prenorm.scale"] == (6144,)
    assert ours["blocks.27.mod.lin"] == (6 * 6144,)
    assert layout("krea2.diffusers")["transformer_blocks.27.scale_shift_table"] == (6, 6144)


def test_minimax_h3_has_one_buffer_that_diffusers_works_out_anew():
    two_way = get_architecture("minimax_h3").two_way
    assert set(written("minimax_h3")) - set(two_way.shapes(layout("minimax_h3.diffusers"))) == {"rope.inv_freq"}
    assert set(two_way.computed) == {"rope.inv_freq"}


def runs(row: str, direction: str, name: str):
    two_way = get_architecture(CARDS[row]).two_way
    source = layout(f"{row}.diffusers") if direction == "to_ours" else written(row)
    target = next(target for target in getattr(two_way, direction)(source) if target.name == name)
    return [(run.key, run.start, run.stop) for run in target.runs]


def test_lumina_2_has_fewer_rows_for_k_and_v_than_for_q():
    key = "layers.3.attention.qkv.weight"
    assert runs("lumina2", "to_theirs", "layers.3.attn.to_q.weight") == [(key, 0, 2304)]
    assert runs("lumina2", "to_theirs", "layers.3.attn.to_k.weight") == [(key, 2304, 3072)]
    assert runs("lumina2", "to_theirs", "layers.3.attn.to_v.weight") == [(key, 3072, 3840)]


def test_the_single_blocks_of_flux_hold_q_k_v_and_the_feed_forward():
    key = "single_blocks.7.linear1.bias"
    assert runs("flux_dev", "to_theirs", "single_transformer_blocks.7.attn.to_v.bias") == [(key, 6144, 9216)]
    assert runs("flux_dev", "to_theirs", "single_transformer_blocks.7.proj_mlp.bias") == [(key, 9216, 21504)]
    joined = [name for name, _, _ in runs("flux_dev", "to_ours", key)]
    assert joined == [
        f"single_transformer_blocks.7.{name}.bias" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    ]


def test_shift_and_scale_change_places_where_a_layer_makes_two_vectors():
    assert runs("flux_dev", "to_theirs", "norm_out.linear.bias") == [
        ("final_layer.adaLN_modulation.1.bias", 3072, 6144),
        ("final_layer.adaLN_modulation.1.bias", 0, 3072),
    ]
    last, other = "transformer_blocks.23.norm1_context.linear.bias", "transformer_blocks.22.norm1_context.linear.bias"
    assert len(runs("sd35_medium", "to_theirs", last)) == 2
    assert len(runs("sd35_medium", "to_theirs", other)) == 1


def test_the_second_norm_of_wan_in_diffusers_is_the_third_in_comfyui():
    assert runs("wan21_t2v_1_3b", "to_ours", "blocks.5.norm3.bias") == [("blocks.5.norm2.bias", 0, None)]


# ---- incomplete and foreign files ----------------------------------------------------------------------------------


@rows
def test_a_missing_and_a_foreign_key_are_named(row):
    two_way = get_architecture(CARDS[row]).two_way
    for name, problems in ((f"{row}.diffusers", two_way.problems_theirs), (f"{row}.comfy", two_way.problems_ours)):
        shapes = layout(name)
        gone = next(key for key in shapes if re.search(r"\.1\..*att.*\.weight$", key))
        assert problems({key for key in shapes if key != gone} | {"strange.weight"}) == (
            [two_way.spelled(gone) if name.endswith(".comfy") else gone],
            ["strange.weight"],
        )


def test_a_guidance_that_is_there_in_part_is_missing_in_part():
    shapes = layout("flux_dev.comfy")
    del shapes["guidance_in.out_layer.bias"]
    assert get_architecture("flux").two_way.problems_ours(shapes) == (["guidance_in.out_layer.bias"], [])


def test_what_publishers_leave_in_their_files_is_ignored():
    for row in ("z_image", "lumina2"):
        assert (
            get_architecture(CARDS[row]).two_way.problems_ours({**layout(f"{row}.comfy"), "norm_final.weight": 1})[1]
            == []
        )


# ---- beside diffusers' own single-file converters ------------------------------------------------------------------

CONVERTERS = {
    "z_image": "convert_z_image_transformer_checkpoint_to_diffusers",
    "flux_dev": "convert_flux_transformer_checkpoint_to_diffusers",
    "flux_schnell": "convert_flux_transformer_checkpoint_to_diffusers",
    "flux2_dev": "convert_flux2_transformer_checkpoint_to_diffusers",
    "flux2_klein_4b": "convert_flux2_transformer_checkpoint_to_diffusers",
    "flux2_klein_9b": "convert_flux2_transformer_checkpoint_to_diffusers",
    "chroma": "convert_chroma_transformer_checkpoint_to_diffusers",
    "wan21_t2v_14b": "convert_wan_transformer_to_diffusers",
    "wan21_t2v_1_3b": "convert_wan_transformer_to_diffusers",
    "wan21_i2v_14b": "convert_wan_transformer_to_diffusers",
    "wan22_i2v_14b": "convert_wan_transformer_to_diffusers",
    "wan22_ti2v_5b": "convert_wan_transformer_to_diffusers",
    "krea2": "convert_krea2_transformer_checkpoint_to_diffusers",
    "ernie_image": "convert_ernie_image_transformer_checkpoint_to_diffusers",
    "lumina2": "convert_lumina2_to_diffusers",
    "sd35_large": "convert_sd3_transformer_checkpoint_to_diffusers",
    "sd35_medium": "convert_sd3_transformer_checkpoint_to_diffusers",
    "minimax_h3": "convert_minimax_h3_transformer_checkpoint_to_diffusers",
}


def numbered(shapes):
    """A tensor for every key in which each row has a number of its own; one column, for converters move rows."""
    torch = pytest.importorskip("torch")
    tensors, start = {}, 0
    for key, shape in shapes.items():
        narrow = (shape[0], 1) if len(shape) == 2 else shape if len(shape) == 1 else (1,) * len(shape)
        tensors[key] = torch.arange(start, start + narrow[0]).reshape(narrow)
        start += narrow[0]
    return tensors


@pytest.mark.parametrize("row", list(CONVERTERS))
def test_diffusers_own_converter_moves_every_row_to_the_same_place(row):
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("diffusers.loaders.single_file_utils")
    tensors = numbered(written(row))
    theirs = getattr(utils, CONVERTERS[row])(dict(tensors), config={})
    for target in get_architecture(CARDS[row]).two_way.to_theirs(written(row)):
        rows = [tensors[run.key] if run.stop is None else tensors[run.key][run.start : run.stop] for run in target.runs]
        assert torch.equal(torch.cat(rows).flatten(), theirs.pop(target.name).flatten()), target.name
    assert theirs == {}


# ---- the cards themselves ------------------------------------------------------------------------------------------


def core_cards():
    return [card for card in architectures() if card.module is None]


def test_cards_of_core_models_say_what_may_be_quantized_and_why_the_rest_may_not():
    assert {card.name for card in core_cards()} == set(CARDS.values())
    for card in core_cards():
        assert card.quantization.blocks and all(why for _, why in card.quantization.never), card.name


def test_every_file_name_of_a_core_card_has_the_address_it_was_read_from():
    for card in core_cards():
        names = {name for files in card.files.values() for name in files}
        assert names == set(card.downloads), card.name
        for name, url in card.downloads.items():
            assert url.startswith("https://huggingface.co/") and os.path.basename(url) == name


@pytest.mark.parametrize("row", ["z_image", "flux_dev", "lumina2"])
def test_layers_that_comfyui_fuses_get_one_format_from_a_budget(row, tmp_path):
    """A file of full size that holds nothing: only its header is read."""
    from nativedit.checkpoints.quantize import fused_groups
    from nativedit.files.writer import encode_header

    head, placed = encode_header((key, "BF16", shape) for key, shape in layout(f"{row}.diffusers").items())
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + max(info.end for info in placed.values()))

    groups = fused_groups(path)

    assert groups and all(f"{layer}.weight" in placed for group in groups for layer in group)
    triples = [group for group in groups if group[0].endswith("to_q")]
    assert triples and all(re.sub(r"to_[qkv]$", "", layer) == group[0][:-4] for group in triples for layer in group[:3])
