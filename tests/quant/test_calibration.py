"""Calibrated layers: scales of their inputs in ComfyUI's storage, and less error on inputs with outlier channels.

Errors are those of the layer's output against a product in float64.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nativedit.files import open_source
from nativedit.quant.calibration import Calibration, Inputs, Watcher, read_calibration, write_calibration
from nativedit.quant.convert import quantize
from nativedit.quant.craft import Craft
from nativedit.quant.errors import QuantError
from nativedit.quant.kitchen import layout_of
from nativedit.quant.measure import weighted_error, weighted_sqnr
from nativedit.quant.ops import ComfyUIOps

N, K, TOKENS = 256, 512, 64
LAYER = "blocks.0.mlp.up"

pytestmark = pytest.mark.usefixtures("single_thread")


def _noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def weight() -> torch.Tensor:
    return (_noise(0, N, K) * 0.05).to(torch.bfloat16)


@pytest.fixture
def tokens() -> torch.Tensor:
    """Eight channels are 60 to 2000 times as large as the others, as behind a modulated norm."""
    x = _noise(1, TOKENS, K)
    x[:, 3::64] *= torch.logspace(1.8, 3.3, 8)
    return x.to(torch.bfloat16)


@pytest.fixture
def statistics(tokens) -> Calibration:
    watcher = Watcher()
    for part in tokens.split(16):
        watcher.add(LAYER, part)
    return watcher.calibration(steps=4)


def _quantized(tmp_path, weight, format, craft, prefix="model.diffusion_model."):
    source, target = tmp_path / "model.safetensors", tmp_path / "quantized.safetensors"
    save_file({f"{prefix}{LAYER}.weight": weight, f"{prefix}norm.weight": torch.ones(K)}, source)
    report = quantize(source, target, format=format, policy={"min_weights": 0, "include": [LAYER]}, craft=craft)
    tensors = {key.removeprefix(f"{prefix}{LAYER}."): value for key, value in load_file(target).items() if LAYER in key}
    return tensors, report


def _loaded(tensors, operations=ComfyUIOps):
    layer = operations.Linear(K, N, bias=False, dtype=torch.bfloat16)
    layer.load_state_dict(tensors)
    return layer


def _output(tensors, tokens) -> torch.Tensor:
    """What ComfyUI's fast product gives: the input scaled and cast to the format, too, then both multiplied exactly."""
    layer = _loaded(tensors)
    factor = tensors.get("pre_quant_scale")
    x = tokens if factor is None else tokens * factor.to(tokens.dtype)
    name = layer.quantization.recipe.format
    scale = tensors.get("input_scale", torch.ones(()) if name.startswith("float8") else None)
    layout = layout_of(name)
    x = layout.dequantize(*layout.quantize(x, scale=scale))[:TOKENS, :K]
    return x.double() @ layer.dequantized(torch.float32).double().t()


def _error(tensors, weight, tokens) -> float:
    exact = tokens.double() @ weight.double().t()
    return float((_output(tensors, tokens) - exact).norm() / exact.norm())


def test_statistics_are_the_largest_magnitude_and_the_mean_square_of_every_channel(tokens, statistics):
    inputs = statistics.layers[LAYER]
    assert torch.equal(inputs.amax, tokens.float().abs().amax(0))
    assert torch.allclose(inputs.power.double(), tokens.double().square().mean(0), rtol=1e-6)
    assert statistics.about == {"rows": TOKENS, "steps": 4}


def test_hooks_see_what_every_linear_layer_is_given_and_go_away_again():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    x = _noise(2, 5, 8)
    with Watcher().on(model) as watcher:
        model(x)
    model(100 * x)
    found = watcher.calibration().layers
    assert list(found) == ["0", "2"]
    assert torch.equal(found["0"].amax, x.abs().amax(0))
    assert torch.equal(found["2"].amax, torch.nn.functional.gelu(model[0](x)).abs().amax(0))


def test_statistics_survive_their_file(tmp_path, statistics):
    write_calibration(statistics, tmp_path / "stats.safetensors")
    again = read_calibration(tmp_path / "stats.safetensors")
    assert torch.equal(again.layers[LAYER].amax, statistics.layers[LAYER].amax)
    assert torch.equal(again.layers[LAYER].power, statistics.layers[LAYER].power)
    assert again.about == {"version": 1, "rows": TOKENS, "steps": 4}


def test_float8_is_calibrated_by_the_largest_input(tmp_path, weight, tokens, statistics):
    tensors, _ = _quantized(tmp_path, weight, "float8_e4m3fn", Craft(calibration=statistics))
    assert tensors["input_scale"].dtype == torch.float32 and tensors["input_scale"].shape == ()
    assert float(tensors["input_scale"]) == pytest.approx(float(tokens.float().abs().amax()) / 448, rel=1e-6)
    # Without it ComfyUI would cast inputs at scale 1, which is why such layers ask for a product in full precision.
    assert json.loads(bytes(tensors["comfy_quant"].tolist())) == {"format": "float8_e4m3fn"}


def test_calibrated_float8_has_less_error_on_outlier_channels(tmp_path, weight, tokens, statistics):
    plain, _ = _quantized(tmp_path, weight, "float8_e4m3fn", Craft())
    calibrated, _ = _quantized(tmp_path, weight, "float8_e4m3fn", Craft(calibration=statistics))
    assert torch.equal(plain["weight"].view(torch.uint8), calibrated["weight"].view(torch.uint8))
    before, after = _error(plain, weight, tokens), _error(calibrated, weight, tokens)
    assert before > 0.3  # clipped at 448
    assert after < 0.05


def test_smoothed_nvfp4_has_less_error_on_outlier_channels(tmp_path, weight, tokens, statistics):
    plain, _ = _quantized(tmp_path, weight, "nvfp4", Craft())
    calibrated, _ = _quantized(tmp_path, weight, "nvfp4", Craft(calibration=statistics))
    smoothed, _ = _quantized(tmp_path, weight, "nvfp4", Craft(calibration=statistics, smooth=True))
    errors = [_error(tensors, weight, tokens) for tensors in (plain, calibrated, smoothed)]
    assert errors[1] < 1.05 * errors[0]
    assert errors[2] < 0.8 * errors[0]


def test_smoothing_is_a_power_of_two_per_channel_that_the_weight_takes_back(tmp_path, weight, statistics):
    tensors, _ = _quantized(tmp_path, weight, "nvfp4", Craft(calibration=statistics, smooth=True))
    scale = tensors["pre_quant_scale"]
    assert scale.dtype == torch.bfloat16 and scale.shape == (K,)
    assert torch.equal(scale, torch.exp2(torch.log2(scale.float()).round()).to(torch.bfloat16))
    restored = _loaded(tensors).dequantized(torch.float32) * scale.float()
    plain = _loaded(_quantized(tmp_path, weight, "nvfp4", Craft())[0]).dequantized(torch.float32)
    power = statistics.layers[LAYER].power
    assert weighted_error(weight, restored, power) < weighted_error(weight, plain, power)


def test_a_smoothed_layer_gives_the_plain_layers_output(tmp_path, weight, tokens, statistics):
    tensors, _ = _quantized(tmp_path, weight, "nvfp4", Craft(calibration=statistics, smooth=True))
    exact = tokens.double() @ weight.double().t()
    assert float((_loaded(tensors)(tokens).double() - exact).norm() / exact.norm()) < 0.12


@pytest.mark.parametrize("format", ["int8_convrot", "mxfp8"])
def test_formats_that_scale_every_input_by_itself_stay_as_they_are(tmp_path, weight, statistics, format):
    plain, _ = _quantized(tmp_path, weight, format, Craft())
    calibrated, _ = _quantized(tmp_path, weight, format, Craft(calibration=statistics))
    assert plain.keys() == calibrated.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor.view(torch.uint8), calibrated[name].view(torch.uint8))


def test_statistics_of_another_model_are_refused(tmp_path, weight):
    other = Calibration("stats.safetensors", {"layers.7.wq": Inputs(torch.ones(K), torch.ones(K))})
    with pytest.raises(QuantError, match=r"stats\.safetensors.*knows none of the layers.*layers\.7\.wq"):
        _quantized(tmp_path, weight, "nvfp4", Craft(calibration=other))
    wide = Calibration("stats.safetensors", {LAYER: Inputs(torch.ones(K + 1), torch.ones(K + 1))})
    with pytest.raises(QuantError, match=f"{K + 1} input channels"):
        _quantized(tmp_path, weight, "nvfp4", Craft(calibration=wide))


def test_a_file_without_statistics_is_refused(tmp_path, weight):
    save_file({"a.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(QuantError, match="holds no statistics"):
        read_calibration(tmp_path / "model.safetensors")


def test_smoothing_without_statistics_is_refused():
    with pytest.raises(ValueError, match="choose a calibration"):
        Craft(smooth=True)


def test_weighted_error_is_that_of_the_output_in_float64(weight):
    power = torch.rand(K, generator=torch.Generator().manual_seed(3)) * 10
    rounded = weight.to(torch.float8_e4m3fn).to(torch.bfloat16)
    x = _noise(4, 20000, K).double() * power.double().sqrt()
    exact = x @ weight.double().t()
    expected = float((x @ rounded.double().t() - exact).norm() / exact.norm())
    assert weighted_error(weight, rounded, power) == pytest.approx(expected, rel=0.01)
    assert weighted_sqnr(weight, weight, power) == float("inf")
    with pytest.raises(ValueError, match="one shape"):
        weighted_error(weight, rounded, power[1:])


def test_float32_arithmetic_is_at_least_as_exact(tmp_path, weight):
    for format in ("int8_convrot", "float8_e4m3fn", "nvfp4"):
        found = {}
        for compute in ("stored", "float32"):
            tensors, _ = _quantized(tmp_path, weight, format, Craft(compute))
            restored = _loaded(tensors).dequantized(torch.float32)
            found[compute] = float((restored.double() - weight.double()).norm())
        assert found["float32"] <= found["stored"], format


def test_inspect_still_reads_calibrated_files(tmp_path, weight, statistics):
    _quantized(tmp_path, weight, "nvfp4", Craft(calibration=statistics, smooth=True))
    with open_source(tmp_path / "quantized.safetensors") as source:
        names = {key.rsplit(".", 1)[1] for key in source if LAYER in key}
    assert {"input_scale", "pre_quant_scale"} <= names
