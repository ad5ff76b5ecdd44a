"""Cutting a quantized layer along its inputs, as devices that share it would: between groups, or refused by name."""

from __future__ import annotations

import pytest
import torch
from support import rel_err

from nativedit.quant.formats import parse_recipe
from nativedit.quant.kitchen import quantize_matrix
from nativedit.quant.layer import dequantize_tensors
from nativedit.quant.surgery import QuantizedWeight, split, split_inputs

ROWS, COLUMNS = 48, 512
# recipe -> parts that 512 inputs can be cut into, parts that they can't
PARTS = {
    "int8_convrot": (2, 4),
    "int8_tensorwise:convrot=64": (8, 16),
    "int8_tensorwise": (512, 3),
    "float8_e4m3fn": (16, 5),
    "mxfp8": (16, 32),
    "nvfp4": (32, 64),
    "convrot_w4a4": (2, 4),
    "convrot_w4a4:convrot=16": (8, 16),
    "asym_w4a8_int8": (2, 4),
}


def quantized(name: str) -> QuantizedWeight:
    recipe = parse_recipe(name)
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    return QuantizedWeight(quantize_matrix(weight.to(torch.bfloat16), recipe), recipe, (ROWS, COLUMNS))


def floats(weight: QuantizedWeight) -> torch.Tensor:
    return dequantize_tensors(weight.tensors, weight.recipe, weight.shape, torch.float32)


@pytest.mark.parametrize("name", PARTS)
def test_the_products_of_the_pieces_add_up(name: str):
    whole, x = quantized(name), torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(4))
    parts, _ = PARTS[name]

    pieces = split_inputs(whole, parts, "blocks.0.mlp.down")

    assert len(pieces) == parts and all(piece.shape == (ROWS, COLUMNS // parts) for piece in pieces)
    assert rel_err(torch.cat([floats(piece) for piece in pieces], 1), floats(whole)) < 1e-6
    partial = [part @ floats(piece).T for part, piece in zip(x.chunk(parts, 1), pieces, strict=True)]
    assert rel_err(sum(partial), x @ floats(whole).T) < 1e-5


@pytest.mark.parametrize("name", PARTS)
def test_g09_a_cut_through_a_group_is_refused_with_the_layers_name(name: str):
    with pytest.raises(ValueError, match=r"'blocks\.0\.mlp\.down': 512 input features can't be cut into \d+ parts"):
        split_inputs(quantized(name), PARTS[name][1], "blocks.0.mlp.down")


@pytest.mark.parametrize("name", PARTS)
def test_any_layer_is_cut_by_its_outputs(name: str):
    whole = quantized(name)

    assert torch.equal(torch.cat([floats(piece) for piece in split(whole, [16, 32])]), floats(whole))
