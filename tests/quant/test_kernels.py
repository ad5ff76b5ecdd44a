"""The pack's own kernels write comfy-kitchen's bytes, on ordinary weights and on the odd ones."""

import pytest
import torch
from comfy_kitchen.backends.eager.quantization import rotate_int8_convrot_weight
from comfy_kitchen.float_utils import to_blocked
from comfy_kitchen.tensor.int8_utils import _build_hadamard

from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.kernels import peak_of, quantize_fast, tiled
from nativedit.quant.kitchen import layout_of, tensor_scale
from nativedit.quant.rotation import hadamard, rotated, rotated_at_once

RECIPES = [
    "int8_convrot",
    "int8_tensorwise",
    "int8_tensorwise:scale=tensor",
    "int8_tensorwise:convrot=64",
    "float8_e4m3fn",
    "float8_e5m2",
    "mxfp8",
    "nvfp4",
    "convrot_w4a4",
    "convrot_w4a4:convrot=64",
]

pytestmark = pytest.mark.usefixtures("single_thread")


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _zeros() -> torch.Tensor:
    weight = _noise(1, 64, 512)
    weight[3], weight[5] = 0.0, -0.0
    weight[:, 64:128] = 0.0
    weight[7, ::2] = -0.0
    return weight


WEIGHTS = {
    "ordinary": _noise(0, 64, 512) * 0.02,
    "heavy-tailed": _noise(1, 64, 512) * torch.exp(3 * _noise(2, 64, 512)),
    "rows of very unequal size": _noise(3, 64, 512) * 10.0 ** (12 * _noise(4, 64, 1)).clamp(-30, 30),
    "denormal": _noise(5, 64, 512) * 1e-38,
    "near the largest number": _noise(6, 64, 512) * 1e36,
    "zeros of both signs": _zeros(),
    "ties": (_noise(7, 64, 512) * 4).round() / 2,
    "an odd number of rows": _noise(8, 99, 1024),
    "every exponent": torch.randint(-32768, 32768, (64, 512), generator=torch.Generator().manual_seed(9))
    .to(torch.int16)
    .view(torch.bfloat16)
    .float()
    .nan_to_num(0, 0, 0)
    .clamp(-1e30, 1e30),
}


def _by_kitchen(weight, recipe, scale):
    keywords = {"scale": scale} if scale is not None else {}
    if recipe.format.startswith("float8"):
        keywords["dtype"] = getattr(torch, recipe.format)
    if recipe.format == "int8_tensorwise":
        keywords["per_channel"] = recipe.row_scales
        keywords["convrot"] = bool(recipe.convrot_groupsize)
    if recipe.convrot_groupsize:
        keywords["convrot_groupsize"] = recipe.convrot_groupsize
    layout = layout_of(recipe.format)
    return {
        f"weight{key}": value for key, value in layout.state_dict_tensors(*layout.quantize(weight, **keywords)).items()
    }


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", RECIPES)
def test_the_bytes_are_comfy_kitchens(name, weight, dtype):
    recipe, weight = parse_recipe(name), weight.to(dtype)
    scale = tensor_scale(recipe, weight.abs().amax())
    before = weight.clone()
    ours, theirs = quantize_fast(weight, recipe, scale), _by_kitchen(weight, recipe, scale)
    assert torch.equal(weight, before)
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype, key
        assert torch.equal(_bytes(ours[key]), _bytes(tensor)), key


@pytest.mark.parametrize("name", [name for name in RECIPES if "convrot" not in name and name != "int8_tensorwise"])
def test_without_a_given_scale_they_are_comfy_kitchens_too(name):
    recipe, weight = parse_recipe(name), _noise(10, 64, 512).to(torch.bfloat16)
    for key, tensor in _by_kitchen(weight, recipe, None).items():
        assert torch.equal(_bytes(quantize_fast(weight, recipe)[key]), _bytes(tensor)), key


@pytest.mark.parametrize("shape", [(72, 200), (16, 48), (1, 16), (130, 32)])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_block_formats_pad_as_comfy_kitchen_does(name, shape):
    recipe, weight = parse_recipe(name), _noise(11, *shape).to(torch.bfloat16)
    for key, tensor in _by_kitchen(weight, recipe, tensor_scale(recipe, weight.abs().amax())).items():
        ours = quantize_fast(weight, recipe, tensor_scale(recipe, weight.abs().amax()))[key]
        assert ours.shape == tensor.shape
        assert torch.equal(_bytes(ours), _bytes(tensor)), key


@pytest.mark.parametrize("size", [4, 16, 64, 256, 1024])
def test_the_rotation_matrix_is_comfy_kitchens(size):
    assert torch.equal(hadamard(size), _build_hadamard(size))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(64, 1024), (99, 1024), (1, 2048), (2500, 256)])
def test_the_long_product_is_comfy_kitchens(shape, dtype):
    weight = _noise(14, *shape).to(dtype)
    for group in (4, 64, 256):
        assert torch.equal(rotated_at_once(weight, group), rotate_int8_convrot_weight(weight, group))


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (129, 5), (300, 192), (256, 13)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_the_tiles_of_block_scales_are_comfy_kitchens(shape, dtype):
    scales = torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(15)).to(torch.uint8).view(dtype)
    assert torch.equal(tiled(scales).view(torch.uint8), to_blocked(scales, flatten=False).view(torch.uint8))


@pytest.mark.parametrize("group", [4, 16, 64, 256, 1024])
@pytest.mark.parametrize("weight", [WEIGHTS["ordinary"], WEIGHTS["heavy-tailed"]], ids=["ordinary", "heavy-tailed"])
def test_the_two_short_products_round_as_the_long_one(group, weight):
    weight = weight.view(-1, 1024).to(torch.bfloat16)
    assert torch.equal(rotated(weight, group), rotate_int8_convrot_weight(weight, group))


@pytest.mark.parametrize("group", [64, 256])
def test_rows_that_follow_the_matrix_round_as_in_the_long_product(group):
    generator = torch.Generator().manual_seed(group)
    rows = 1 + torch.randint(0, 128, (8192, group), generator=generator) / 128
    small = torch.rand(8192, group, generator=generator) < 0.1
    rows = torch.where(small, rows * 2.0 ** torch.randint(-13, -5, rows.shape, generator=generator), rows)
    columns = torch.randint(0, group, (8192,), generator=generator)
    signs = rotate_int8_convrot_weight(torch.eye(group), group)[columns].sign()
    weight = (rows * signs).to(torch.bfloat16)
    assert torch.equal(rotated(weight, group), rotate_int8_convrot_weight(weight, group))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_weight_shows_in_the_peak(value):
    weight = _noise(12, 8, 8).to(torch.bfloat16)
    assert peak_of(weight) == weight.abs().amax()
    weight[3, 4] = value
    assert not torch.isfinite(peak_of(weight))


def test_other_dtypes_and_formats_are_left_to_comfy_kitchen():
    assert quantize_fast(_noise(13, 16, 256).half(), parse_recipe("nvfp4")) is None
    assert quantize_fast(_noise(13, 16, 256).to(torch.bfloat16), FORMATS["asym_w4a8_int8"].default) is None
