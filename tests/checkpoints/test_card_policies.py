"""Which layers of core's models the cards quantize, decided on full-size key sets of both layouts."""

from __future__ import annotations

import fnmatch

import pytest
from key_layouts import CARDS, layout

from nativedit.quant.formats import parse_recipe
from nativedit.quant.policy import Policy, decide
from nativedit.supported_models import find_architecture, get_architecture


def decisions(name: str, prefix: str = ""):
    shapes = {prefix + key: shape for key, shape in layout(name).items()}
    card = find_architecture(shapes).architecture.quantization
    tensors = {key: ("BF16", shape, 0) for key, shape in shapes.items()}
    return decide(tensors, Policy(parse_recipe(card.layout or "int8_convrot"), card=card))


def quantized(name: str, prefix: str = "") -> list[str]:
    return [decision.layer for decision in decisions(name, prefix) if decision.recipe is not None]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_z_image_in_int8_convrot_has_202_quantized_layers_and_857_keys(prefix):
    """The numbers of the published z_image_turbo_int8_convrot.safetensors."""
    layers = quantized("z_image.comfy", prefix)
    assert len(layers) == 202
    assert len(layout("z_image.comfy")) + 2 * len(layers) == 857
    assert len(quantized("z_image.diffusers")) == 270


def test_minimax_h3_quantizes_attention_and_mlp_of_its_fifty_blocks():
    layers = quantized("minimax_h3.comfy")
    assert len(layers) == 200 and all(layer.startswith("blocks.") for layer in layers)
    assert {layer.split(".", 2)[2] for layer in layers} == {"attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2"}


@pytest.mark.parametrize("row", list(CARDS))
def test_both_layouts_quantize_the_same_number_of_weights(row):
    def total(name: str) -> int:
        shapes = layout(name)
        return sum(shapes[f"{layer}.weight"][0] * shapes[f"{layer}.weight"][1] for layer in quantized(name))

    assert total(f"{row}.comfy") == total(f"{row}.diffusers") > 0


@pytest.mark.parametrize("row", list(CARDS))
def test_every_matrix_is_in_a_block_or_kept_for_a_reason_of_the_card(row):
    for name in (f"{row}.comfy", f"{row}.diffusers"):
        for decision in decisions(name):
            kept = decision.recipe is None
            assert not kept or decision.why != "not among the layers that the card quantizes", decision.layer


@pytest.mark.parametrize("card", sorted(set(CARDS.values())))
def test_no_pattern_of_a_card_is_without_a_layer(card):
    policy = get_architecture(card).quantization
    names = [f"{row}.{side}" for row, of in CARDS.items() if of == card for side in ("comfy", "diffusers")]
    layers = {key.removesuffix(".weight") for name in names for key in layout(name)}
    for pattern in (*policy.blocks, *(pattern for pattern, _ in policy.never)):
        assert any(fnmatch.fnmatchcase(layer, pattern) for layer in layers), pattern
