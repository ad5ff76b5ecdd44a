"""From a float file through quantize to a running module, with the card in between: command line and Python calls."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import rel_err

import nativedit
from nativedit.cli import main
from nativedit.files.errors import FileError
from nativedit.ldm.prx.model import PRXTransformer2DModel

CONFIG = {
    "in_channels": 3,
    "patch_size": 8,
    "context_in_dim": 256,
    "hidden_size": 256,
    "mlp_ratio": 2.0,
    "num_heads": 4,
    "depth": 2,
    "bottleneck_size": 64,
    "resolution_embeds": True,
}
FORMATS = {
    "float8_e4m3fn": 0.06,
    "float8_e5m2": 0.12,
    "mxfp8": 0.06,
    "nvfp4": 0.2,
    "int8_tensorwise": 0.03,
    "int8_convrot": 0.03,
    "convrot_w4a4": 0.35,
    "asym_w4a8_int8": 0.25,
}
EVERY_BLOCK_LAYER = {"min_weights": 1000}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(0)
    module = PRXTransformer2DModel(**CONFIG)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 / 16 if parameter.ndim > 1 else 0.1)
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.data.add_(1.0)
    path = tmp_path_factory.mktemp("plain") / "prx_pixel.safetensors"
    save_file({"model.diffusion_model." + key: value.detach() for key, value in module.state_dict().items()}, path)
    return path


@torch.no_grad()
def run(module):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, 32, 48, generator=generator)
    context = torch.randn(1, 5, 256, generator=generator)
    return module(x, torch.tensor([0.6]), context)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_file_loads_as_the_same_model_and_gives_nearly_the_same(plain, tmp_path, name):
    target = tmp_path / "quantized.safetensors"
    report = nativedit.quantize(plain, target, format=name, policy=EVERY_BLOCK_LAYER)
    assert {d.layer.rpartition("model.")[2].split(".")[0] for d in report.quantized} == {"blocks"}
    before, after = nativedit.inspect(plain), nativedit.inspect(target)
    assert after.architecture == "prx_pixel" and after.config == before.config
    assert after.parameters == before.parameters and after.quantization.is_quantized
    expected, got = run(nativedit.load_diffusion_model(plain)), run(nativedit.load_diffusion_model(target))
    assert 0 < rel_err(got, expected) < FORMATS[name]


def test_norms_embedders_modulation_and_the_ends_are_never_quantized(plain, tmp_path):
    report = nativedit.quantize(
        plain, tmp_path / "x.safetensors", format="int8_tensorwise", policy=EVERY_BLOCK_LAYER, dry_run=True
    )
    kept = {decision.layer.rpartition("diffusion_model.")[2]: decision.why for decision in report.kept}
    for layer in (
        "img_in.0",
        "img_in.1",
        "txt_in",
        "time_in.in_layer",
        "final_layer.linear",
        "blocks.0.modulation.lin",
    ):
        assert kept[layer], layer
    assert not (tmp_path / "x.safetensors").exists()


def test_the_commands_make_undo_and_describe_a_file(plain, tmp_path, capsys):
    quantized, back = tmp_path / "q.safetensors", tmp_path / "b.safetensors"
    policy = tmp_path / "policy.toml"
    policy.write_text("min_weights = 1000\n")
    command = ["quantize", str(plain), str(quantized), "--format", "int8_convrot", "--policy", str(policy)]
    assert main([*command, "--dry-run"]) == 0
    assert "blocks.0.attention.img_qkv_proj" in capsys.readouterr().out and not quantized.exists()
    assert main([*command, "--quiet"]) == 0
    assert main(["inspect", str(quantized)]) == 0
    assert "int8_tensorwise" in capsys.readouterr().out
    assert main(["dequantize", str(quantized), str(back), "--dtype", "float32", "--quiet"]) == 0
    assert load_file(back).keys() == load_file(plain).keys()
    assert rel_err(run(nativedit.load_diffusion_model(back)), run(nativedit.load_diffusion_model(plain))) < 0.03


def test_a_second_quantization_is_refused_on_the_command_line_in_one_line(plain, tmp_path, capsys):
    quantized = tmp_path / "q.safetensors"
    nativedit.quantize(plain, quantized, format="float8_e4m3fn", policy=EVERY_BLOCK_LAYER)
    assert main(["quantize", str(quantized), str(tmp_path / "r.safetensors"), "--format", "int8_convrot"]) == 2
    error = capsys.readouterr().err
    assert "--requantize" in error and "Traceback" not in error and not (tmp_path / "r.safetensors").exists()


def test_scales_without_markers_load_right_instead_of_being_used_as_weights(plain, tmp_path):
    quantized, bare = tmp_path / "q.safetensors", tmp_path / "bare.safetensors"
    nativedit.quantize(plain, quantized, format="float8_e4m3fn", policy=EVERY_BLOCK_LAYER)
    save_file({k: v for k, v in load_file(quantized).items() if not k.endswith("comfy_quant")}, bare)
    expected = run(nativedit.load_diffusion_model(quantized))
    assert rel_err(run(nativedit.load_diffusion_model(bare)), expected) < 0.01


def test_a_layer_that_cannot_be_settled_is_refused_by_name(plain, tmp_path):
    quantized, broken = tmp_path / "q.safetensors", tmp_path / "broken.safetensors"
    nativedit.quantize(plain, quantized, format="int8_tensorwise", policy=EVERY_BLOCK_LAYER)
    tensors = load_file(quantized)
    del tensors["model.diffusion_model.blocks.1.up_proj.weight_scale"]
    save_file(tensors, broken)
    with pytest.raises(FileError, match=r"blocks\.1\.up_proj"):
        nativedit.load_diffusion_model(broken)


def test_float8_norms_and_biases_are_loaded_as_floats_that_can_be_multiplied(plain, tmp_path):
    everything = tmp_path / "cast.safetensors"
    save_file({key: value.to(torch.float8_e4m3fn) for key, value in load_file(plain).items()}, everything)
    out = run(nativedit.load_diffusion_model(everything))
    assert out.isfinite().all()
