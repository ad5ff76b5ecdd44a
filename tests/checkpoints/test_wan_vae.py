"""The autoencoders of Wan 2.1, Qwen-Image and Wan 2.2 between Wan's own layout, which ComfyUI has, and diffusers'."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import rel_err

from nativedit.checkpoints.convert import convert
from nativedit.files import FileError, open_source

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

RESIDUAL = {
    "decoder_base_dim": 12,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
# Name -> (diffusers' class, its arguments; None: the published size).
MODELS = {
    "wan 2.1": ("AutoencoderKLWan", {"base_dim": 8}),
    "qwen image": ("AutoencoderKLQwenImage", {"base_dim": 8}),
    "wan 2.2": ("AutoencoderKLWan", {"base_dim": 8, **RESIDUAL}),
}
models = pytest.mark.parametrize("model", list(MODELS))


def module(model: str) -> torch.nn.Module:
    name, arguments = MODELS[model]
    torch.manual_seed(0)
    made = getattr(diffusers, name)(**arguments).requires_grad_(False)
    for parameter in made.parameters():  # norms that are all ones would hide an exchange
        if parameter.ndim != 5:
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return made.train(False)


def read_all(path) -> dict[str, torch.Tensor]:
    with open_source(path) as source:
        return {key: source.read(key) for key in source}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@models
def test_there_and_back_gives_every_bit_and_the_configuration(model, tmp_path):
    made = module(model)
    made.save_pretrained(tmp_path / "vae")
    report = convert(tmp_path / "vae", tmp_path / "file.safetensors")
    assert report.kind == "autoencoder" and report.left_out == []
    convert(tmp_path / "file.safetensors", tmp_path / "back", layout="diffusers")
    assert same(read_all(tmp_path / "back"), made.state_dict())
    assert type(made).from_pretrained(tmp_path / "back").config.z_dim == made.config.z_dim
    assert json.loads((tmp_path / "back/config.json").read_text())["_class_name"] == MODELS[model][0]
    convert(tmp_path / "back", tmp_path / "again.safetensors")
    assert same(load_file(tmp_path / "again.safetensors"), load_file(tmp_path / "file.safetensors"))


@pytest.mark.parametrize("model", ["wan 2.1", "qwen image"])  # it knows no other
def test_diffusers_own_converter_agrees(model, tmp_path):
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    made = module(model)
    made.save_pretrained(tmp_path / "vae")
    convert(tmp_path / "vae", tmp_path / "file.safetensors")
    assert same(convert_wan_vae_to_diffusers(load_file(tmp_path / "file.safetensors")), made.state_dict())


@pytest.mark.parametrize("residual", [False, True])
def test_the_published_sizes_have_exactly_these_keys(residual):
    from nativedit.checkpoints import wan_vae

    sizes = {**RESIDUAL, "base_dim": 160, "decoder_base_dim": 256} if residual else {}
    with torch.device("meta"):
        made = diffusers.AutoencoderKLWan(**sizes)
    theirs = {key: tuple(value.shape) for key, value in made.state_dict().items()}
    assert {key for key, _ in wan_vae._expected(residual, theirs)} == theirs.keys()
    wans = {wan_vae._wans_name(key, residual) for key in theirs}
    assert len(wans) == len(theirs) and {wan_vae._diffusers_name(key, residual) for key in wans} == theirs.keys()


@pytest.mark.parametrize("prefix", ["vae.", "first_stage_model."])
def test_a_prefixed_file_without_a_configuration_comes_back(prefix, tmp_path):
    module("wan 2.1").save_pretrained(tmp_path / "vae")
    convert(tmp_path / "vae", tmp_path / "file.safetensors")
    ours = load_file(tmp_path / "file.safetensors")
    save_file({prefix + key: value for key, value in ours.items()}, tmp_path / "prefixed.safetensors")
    convert(tmp_path / "prefixed.safetensors", tmp_path / "plain.safetensors")
    assert same(load_file(tmp_path / "plain.safetensors"), ours)
    report = convert(tmp_path / "prefixed.safetensors", tmp_path / "back", layout="diffusers")
    assert "AutoencoderKLQwenImage" in report.notes[0]
    assert same(diffusers.AutoencoderKLWan.from_pretrained(tmp_path / "back").state_dict(), read_all(tmp_path / "vae"))


def test_what_no_weight_tells_is_not_invented(tmp_path):
    module("wan 2.2").save_pretrained(tmp_path / "vae")
    convert(tmp_path / "vae", tmp_path / "file.safetensors")
    save_file(load_file(tmp_path / "file.safetensors"), tmp_path / "bare.safetensors")
    with pytest.raises(FileError, match=r"is Wan 2\.2's autoencoder, whose scale of the latents no weight tells"):
        convert(tmp_path / "bare.safetensors", tmp_path / "back", layout="diffusers")


@pytest.mark.parametrize("model", ["wan 2.1", "wan 2.2"])
def test_missing_and_unknown_keys_are_named(model, tmp_path):
    state = module(model).state_dict()
    del state["decoder.mid_block.resnets.1.conv2.weight"]
    state["decoder.extra"] = torch.zeros(1)
    save_file(state, tmp_path / "file.safetensors")
    with pytest.raises(FileError) as error:
        convert(tmp_path / "file.safetensors", tmp_path / "out.safetensors")
    assert "1 weights are missing: decoder.mid_block.resnets.1.conv2.weight" in str(error.value)
    assert "1 are unknown to this model: decoder.extra" in str(error.value)


@pytest.mark.comfyui
def test_comfyuis_modules_decode_our_file_as_diffusers_the_original(tmp_path, comfyui_path, comfyui_interpreter):
    jobs = []
    common = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "dropout": 0.0}
    common["temperal_downsample"] = [False, True, True]
    for model in ("wan 2.1", "wan 2.2"):
        made, name = module(model), model.replace(" ", "_")
        residual = model == "wan 2.2"
        made.save_pretrained(tmp_path / name)
        convert(tmp_path / name, tmp_path / f"{name}.safetensors")
        latent = torch.randn(1, made.config.z_dim, 3, 2, 3, generator=torch.Generator().manual_seed(1))
        save_file({"z": latent}, tmp_path / f"{name}.inputs.safetensors")
        with torch.no_grad():
            pixels = made.decode(latent, return_dict=False)[0]
        save_file({"output": pixels.contiguous()}, tmp_path / f"{name}.theirs.safetensors")
        arguments = {**common, "dim": 8, "z_dim": made.config.z_dim} | ({"dec_dim": 12} if residual else {})
        jobs.append(
            {
                "module": f"comfy.ldm.wan.vae{'2_2' if residual else ''}:WanVAE",
                "method": "decode",
                "arguments": arguments,
                "options": {},
                **{key: str(tmp_path / f"{name}{end}.safetensors")
                   for key, end in (("file", ""), ("inputs", ".inputs"), ("output", ".ours"))},
            }
        )  # fmt: skip
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("comfyui_outputs.py")
    run = subprocess.run(
        [str(comfyui_interpreter), str(script), str(tmp_path / "jobs.json")],
        cwd=comfyui_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    for job in jobs:
        error = Path(job["output"] + ".error")
        assert not error.exists(), error.read_text()
        theirs = load_file(job["output"].replace(".ours.", ".theirs."))["output"]
        ours = load_file(job["output"])["output"].clamp(-1, 1)
        assert ours.shape == theirs.shape and theirs.std() > 1e-2
        assert rel_err(ours, theirs) < 1e-5
