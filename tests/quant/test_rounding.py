"""Better rounding: the same storage, and less error of the layer's output than plain rounding on every kind of layer.

Errors are those of products in float64.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from nativedit.cli import main
from nativedit.quant.calibration import Watcher
from nativedit.quant.convert import quantize
from nativedit.quant.craft import Craft
from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.kitchen import dequantize_matrix, quantize_matrix, tensor_scale
from nativedit.quant.ops import DequantizedOps
from nativedit.quant.rounding import Rounding, best_stretch

N, K, TOKENS = 96, 512, 512
FORMATS_ROUNDED = ["int8_convrot", "int8_tensorwise", "float8_e4m3fn", "float8_e5m2", "nvfp4", "convrot_w4a4"]

pytestmark = pytest.mark.usefixtures("single_thread")


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = {
    "Gaussian": _noise(0, N, K) * 0.02,
    "heavy-tailed": _noise(1, N, K) * torch.exp(_noise(2, N, K)),
    "rows of unequal size": _noise(3, N, K) * torch.exp(2 * _noise(4, N, 1)),
    "columns of unequal size": _noise(5, N, K) * torch.exp(_noise(6, 1, K)),
    "low rank and noise": _noise(7, N, 4) @ _noise(8, 4, K) + 0.1 * _noise(9, N, K),
    "uniform": torch.rand(N, K, generator=torch.Generator().manual_seed(10)) - 0.5,
}


def _restored(weight, name, power=None, rounding=None) -> torch.Tensor:
    recipe = parse_recipe(name)
    scale = tensor_scale(recipe, weight.abs().amax())
    if rounding is None:
        tensors = quantize_matrix(weight, recipe, scale=scale)
    else:
        if name.startswith("float8"):
            scale = scale * best_stretch(weight, recipe, scale, power)
        tensors = rounding.codes(weight, recipe, scale, power)
    for suffix, (_, shape) in FORMATS[recipe.format].entries(tuple(weight.shape), recipe).items():
        assert tuple(tensors[suffix].shape) == shape, suffix
    return dequantize_matrix(tensors, recipe, torch.float32)[: weight.shape[0], : weight.shape[1]]


def _output_error(weight, restored, tokens) -> float:
    exact = tokens.double() @ weight.double().t()
    return float((tokens.double() @ restored.double().t() - exact).norm() / exact.norm())


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", FORMATS_ROUNDED)
def test_without_statistics_outputs_of_gaussian_inputs_have_less_error(name, weight):
    weight, tokens = weight.to(torch.bfloat16), _noise(20, 4 * K, K)
    plain = _restored(weight, name)
    better = _restored(weight, name, None, Rounding())
    assert _output_error(weight, better, tokens) < _output_error(weight, plain, tokens)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", FORMATS_ROUNDED)
def test_with_statistics_outputs_of_such_inputs_have_less_error(name, weight):
    weight, tokens = weight.to(torch.bfloat16), _noise(21, 4 * K, K) * torch.exp(1.5 * _noise(22, 1, K))
    power = tokens.square().mean(0)
    plain = _restored(weight, name)
    better = _restored(weight, name, power, Rounding())
    assert _output_error(weight, better, tokens) < _output_error(weight, plain, tokens)


@pytest.mark.parametrize("name", ["int8_convrot", "convrot_w4a4"])
def test_feedback_uses_what_a_rotation_makes_of_unequal_channels(name):
    weight, tokens = WEIGHTS["Gaussian"].to(torch.bfloat16), _noise(23, 4 * K, K) * torch.exp(1.5 * _noise(24, 1, K))
    searched = _restored(weight, name, None, Rounding())
    fed_back = _restored(weight, name, tokens.square().mean(0), Rounding())
    assert _output_error(weight, fed_back, tokens) < 0.75 * _output_error(weight, searched, tokens)


def test_four_bits_gain_more_than_half_a_decibel_on_a_gaussian():
    weight, tokens = WEIGHTS["Gaussian"].to(torch.bfloat16), _noise(25, 4 * K, K)
    for name in ("nvfp4", "convrot_w4a4"):
        plain = _output_error(weight, _restored(weight, name), tokens)
        assert _output_error(weight, _restored(weight, name, None, Rounding()), tokens) < 0.945 * plain


@pytest.mark.parametrize("name", FORMATS_ROUNDED)
def test_a_file_has_the_same_storage_and_less_error(tmp_path, name):
    source, tokens = tmp_path / "model.safetensors", _noise(26, TOKENS, K) * torch.exp(_noise(27, 1, K))
    weight = WEIGHTS["Gaussian"].to(torch.bfloat16)
    save_file({"blocks.0.up.weight": weight, "blocks.1.up.weight": weight.flip(0)}, source)
    watcher = Watcher()
    watcher.add("blocks.0.up", tokens)
    calibration = watcher.calibration()
    error, kinds = {}, {}
    for label, rounding in (("plain", None), ("feedback", Rounding())):
        target = tmp_path / f"{label}.safetensors"
        craft = Craft(calibration=calibration, rounding=rounding)
        quantize(source, target, format=name, policy={"min_weights": 0, "include": ["blocks.*"]}, craft=craft)
        tensors = load_file(target)
        kinds[label] = {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}
        layer = DequantizedOps.Linear(K, N, bias=False)
        layer.load_state_dict({k.removeprefix("blocks.0.up."): v for k, v in tensors.items() if "blocks.0" in k})
        error[label] = _output_error(weight, layer.dequantized(torch.float32), tokens)
    assert kinds["plain"] == kinds["feedback"]
    assert error["feedback"] < error["plain"]


def test_the_result_is_the_same_every_time(tmp_path):
    weight = WEIGHTS["heavy-tailed"].to(torch.bfloat16)
    power = _noise(28, K).square()
    for name in FORMATS_ROUNDED:
        first, second = (_restored(weight, name, power, Rounding()) for _ in range(2))
        assert torch.equal(first, second), name


def test_no_time_gives_the_plain_scales(tmp_path):
    weight = WEIGHTS["Gaussian"].to(torch.bfloat16)
    none = _restored(weight.float(), "nvfp4", None, Rounding(seconds=0))
    assert torch.equal(none, _restored(weight.float(), "nvfp4"))


@pytest.mark.parametrize("name", ["nvfp4", "convrot_w4a4", "int8_convrot"])
def test_rows_and_blocks_of_zeros_stay_zeros(name):
    weight = WEIGHTS["Gaussian"].clone()
    weight[3], weight[:, :256] = 0.0, 0.0
    restored = _restored(weight.to(torch.bfloat16), name, torch.ones(K), Rounding())
    assert torch.isfinite(restored).all()
    assert not restored[3].any() and not restored[:, :256].any()


def test_a_negative_time_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        Rounding(-1.0)


def test_the_command_rounds_better_too(tmp_path):
    source, weight = tmp_path / "model.safetensors", WEIGHTS["Gaussian"].to(torch.bfloat16)
    save_file({"blocks.0.up.weight": weight, "blocks.1.up.weight": weight.flip(0)}, source)
    errors = []
    for number, options in enumerate(([], ["--rounding", "feedback", "--rounding-seconds", "100"])):
        target = tmp_path / f"{number}.safetensors"
        command = ["quantize", str(source), str(target), "--format", "nvfp4", "--include", "blocks.*", "--quiet"]
        assert main([*command, *options]) == 0
        layer = DequantizedOps.Linear(K, N, bias=False)
        tensors = load_file(target)
        layer.load_state_dict({k.removeprefix("blocks.0.up."): v for k, v in tensors.items() if "blocks.0" in k})
        errors.append(float((layer.dequantized(torch.float32) - weight.float()).norm()))
    assert errors[1] < 0.945 * errors[0]


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_time_for_rounding_is_a_number_of_seconds(seconds):
    with pytest.raises(ValueError, match="a number of at least 0"):
        Rounding(seconds)
