"""Banks of expert weights, unpacked and multiplied all at once."""

import pytest
import torch
from support import rel_err

from nativedit.quant import banks
from nativedit.quant.banks import dequantize_bank, multiply, multiply_quantized
from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.kitchen import dequantize_matrix, quantize_matrix, tensor_scale

NAMES = (
    "float8_e4m3fn",
    "float8_e5m2",
    "nvfp4",
    "mxfp8",
    "int8_tensorwise",
    "int8_tensorwise:scale=tensor",
    "int8_tensorwise:convrot=64",
    "convrot_w4a4:convrot=64",
)
# With and without rows that a format pads, and rows that do not fill a tile of 128.
SHAPES = ((5, 256, 64), (3, 96, 128), (2, 200, 72))


def quantized(recipe, shape):
    """(the bank's tensors, each expert's own), experts of unequal size."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, 1, generator=generator)
    parts = [
        quantize_matrix(one, recipe, scale=tensor_scale(recipe, one.abs().amax())) for one in weight.to(torch.bfloat16)
    ]
    stack = {}
    for suffix, first in parts[0].items():
        narrow = first.element_size() == 1  # float8 can't be stacked on every torch
        own = [part[suffix].view(torch.uint8) if narrow else part[suffix] for part in parts]
        stack[suffix] = torch.stack(own).view(first.dtype)
    return stack, parts


@pytest.mark.parametrize("experts_at_a_time", [None, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_bank_unpacks_to_the_bits_of_its_experts(name, shape, experts_at_a_time, monkeypatch):
    recipe = parse_recipe(name)
    if FORMATS[recipe.format].constraint(shape[1:], recipe):
        assert shape == SHAPES[2]
        return
    if experts_at_a_time:
        monkeypatch.setattr(banks, "PIECE", experts_at_a_time * shape[1] * shape[2])
    tensors, parts = quantized(recipe, shape)
    for dtype in (torch.float32, torch.bfloat16):
        each = torch.stack([dequantize_matrix(part, recipe, dtype)[: shape[1], : shape[2]] for part in parts])
        assert torch.equal(dequantize_bank(tensors, recipe, shape, dtype), each)
        x = torch.randn(shape[0], 4, shape[2]).to(dtype)
        exact = torch.bmm(x.float(), each.float().transpose(1, 2))
        limit = 1e-5 if dtype is torch.float32 else 4e-3
        assert rel_err(multiply_quantized(x, tensors, recipe, shape).float(), exact) <= limit


@pytest.mark.parametrize("slow", [frozenset(), frozenset({torch.bfloat16})])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("published", [False, True])
def test_a_plain_bank_is_multiplied_in_any_type_and_order(x_dtype, dtype, published, slow, monkeypatch):
    """Banks of published files lie [experts, in, out] in memory."""
    monkeypatch.setattr(banks, "SLOW_ON_A_CPU", slow)
    monkeypatch.setattr(banks, "PIECE", 4 * 2 * 24 * 16)
    x, weight = torch.randn(5, 3, 16).to(x_dtype), torch.randn(5, 16, 24).to(dtype)
    weight = weight.transpose(1, 2) if published else weight.transpose(1, 2).contiguous()
    out = multiply(x, weight)
    assert out.dtype is x_dtype
    limit = 1e-6 if x_dtype is torch.float32 else 4e-3
    assert rel_err(out.float(), torch.bmm(x.float(), weight.float().transpose(1, 2))) <= limit
