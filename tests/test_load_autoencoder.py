"""`nativedit.load_autoencoder`: files and diffusers folders, both kinds, and what it says of wrong files."""

from __future__ import annotations

import json
from pathlib import Path

import comfyui_files as files
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import rel_err

import nativedit
from nativedit.files.errors import FileError


def write(folder: Path, kind: str, prefix: str = "") -> tuple[Path, torch.nn.Module]:
    module = files.autoencoder(kind)
    state = files.random_state(module, 6)
    module.load_state_dict(state)
    path = folder / f"{kind}.safetensors"
    save_file({prefix + key: value for key, value in state.items()}, path)
    return path, module


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
@pytest.mark.parametrize("kind", ["kl", "dc_ae"])
@torch.inference_mode()
def test_a_file_is_recognised_and_computes_the_same(tmp_path: Path, kind: str, prefix: str):
    path, module = write(tmp_path, kind, prefix)
    pixels = torch.rand(1, 3, 64, 96) * 2 - 1

    loaded = nativedit.load_autoencoder(path)

    latent = loaded.encode(pixels)
    assert rel_err(latent, module.encode(pixels)) < 1e-6
    assert rel_err(loaded.decode(latent), module.decode(latent)) < 1e-6
    assert not loaded.training


@torch.inference_mode()
def test_the_publishers_dc_ae_computes_the_same_and_converts(tmp_path: Path):
    _, module = write(tmp_path, "dc_ae")
    published, converted = tmp_path / "model.safetensors", tmp_path / "dc_ae_ours.safetensors"
    save_file(files.publishers_dc_ae(module.state_dict()), published)
    pixels = torch.rand(1, 3, 64, 96) * 2 - 1

    nativedit.convert(published, converted)

    for path in (published, converted):
        assert rel_err(nativedit.load_autoencoder(path).encode(pixels), module.encode(pixels)) < 1e-6
    assert load_file(converted).keys() == module.state_dict().keys()


def test_the_autoencoder_of_an_architecture(tmp_path: Path):
    path, _ = write(tmp_path, "kl")

    loaded = nativedit.load_autoencoder(path, architecture="cogview4", dtype="bfloat16")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    with pytest.raises(FileError, match="is an autoencoder, but not a dc_ae"):
        nativedit.load_autoencoder(path, architecture="sana")


def test_a_diffusers_folder_says_what_shapes_do_not(tmp_path: Path):
    folder = tmp_path / "vae"
    folder.mkdir()
    path, _ = write(tmp_path, "kl")
    path.rename(folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL", "norm_num_groups": 16}))

    loaded = nativedit.load_autoencoder(tmp_path)

    assert loaded.encoder.conv_norm_out.num_groups == 16


def test_a_configuration_given_beats_the_files(tmp_path: Path):
    path, _ = write(tmp_path, "kl")

    assert nativedit.load_autoencoder(path, config={"norm_num_groups": 8}).encoder.conv_norm_out.num_groups == 8
    with pytest.raises(FileError, match="its configuration does not fit"):
        nativedit.load_autoencoder(path, config={"norm_num_groups": 7})


def test_a_missing_weight_is_named(tmp_path: Path):
    path, module = write(tmp_path, "kl")
    state = module.state_dict()
    del state["decoder.conv_norm_out.weight"]
    save_file(state, path)

    with pytest.raises(FileError, match=r"decoder\.conv_norm_out\.weight"):
        nativedit.load_autoencoder(path)


def test_another_kind_of_file_is_called_what_it_is(tmp_path: Path):
    save_file(files.dit_state(), tmp_path / "model.safetensors")

    with pytest.raises(FileError, match="is a diffusion model, not an autoencoder"):
        nativedit.load_autoencoder(tmp_path / "model.safetensors")
