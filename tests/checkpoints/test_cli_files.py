"""convert, resolve and lora on the command line: what they print, their exit codes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_module, write_folder

pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")


def main(*arguments: object) -> int:
    from nativedit.cli import main

    return main([str(argument) for argument in arguments])


def test_convert_both_ways(tmp_path, capsys):
    folder = write_folder(tmp_path / "there", tiny_module("lumina2"))
    assert main("convert", folder, tmp_path / "m.safetensors", "--quiet") == 0
    assert "Lumina-Image 2.0 in comfy layout" in capsys.readouterr().out
    assert main("convert", tmp_path / "m.safetensors", tmp_path / "back", "--to", "diffusers", "--quiet") == 0
    assert json.loads((tmp_path / "back/config.json").read_text())["_class_name"] == "Lumina2Transformer2DModel"
    assert main("convert", tmp_path / "m.safetensors", tmp_path / "m.safetensors", "--quiet") == 2
    assert "is the source itself" in capsys.readouterr().err


def test_convert_joins_parts(tmp_path, capsys):
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"b.weight": torch.zeros(3)}, tmp_path / "b.safetensors")
    all_in_one = tmp_path / "all.safetensors"
    assert (
        main(
            "convert", tmp_path / "a.safetensors", all_in_one, "--with", f"vae={tmp_path / 'b.safetensors'}", "--quiet"
        )
        == 0
    )
    assert set(load_file(all_in_one)) == {"model.diffusion_model.a.weight", "vae.b.weight"}
    assert main("convert", tmp_path / "a.safetensors", all_in_one, "--with", "vae", "--quiet") == 2
    assert "PREFIX=FILE was expected" in capsys.readouterr().err


def test_resolve_prints_the_path_or_says_what_is_missing(tmp_path, capsys):
    folder = tmp_path / "models/vae"
    folder.mkdir(parents=True)
    save_file({"a": torch.zeros(1)}, folder / "ae.safetensors")
    assert main("resolve", "ae.safetensors", "--models-dir", tmp_path / "models") == 0
    assert capsys.readouterr().out.strip() == str(folder / "ae.safetensors")
    assert main("resolve", "gone.safetensors", "--models-dir", tmp_path / "models") == 2
    assert "is not among the models" in capsys.readouterr().err
    workflow = {"1": {"class_type": "VAELoader", "inputs": {"vae_name": "ae.safetensors"}}}
    (tmp_path / "w.json").write_text(json.dumps(workflow))
    assert main("resolve", "--workflow", tmp_path / "w.json", "--models-dir", tmp_path / "models") == 0
    workflow["2"] = {"class_type": "UNETLoader", "inputs": {"unet_name": "flux1-dev.safetensors"}}
    (tmp_path / "w.json").write_text(json.dumps(workflow))
    assert main("resolve", "--workflow", tmp_path / "w.json", "--models-dir", tmp_path / "models") == 1
    assert "missing   flux1-dev.safetensors  from https://huggingface.co/" in capsys.readouterr().out
    assert main("resolve", "--models-dir", tmp_path / "models") == 2


def test_lora_is_written_beside_its_source(tmp_path, capsys):
    start = "diffusion_model.layers.0.attention.out"
    state = {f"{start}.lora_A.weight": torch.zeros(2, 8), f"{start}.lora_B.weight": torch.zeros(8, 2)}
    save_file(state, tmp_path / "l.safetensors")
    assert main("lora", tmp_path / "l.safetensors", "--to", "diffusers", "--architecture", "z_image") == 0
    assert set(load_file(tmp_path / "l.diffusers.safetensors")) == {
        f"transformer.layers.0.attention.to_out.0.lora_{x}.weight" for x in "AB"
    }
    assert main("lora", tmp_path / "l.safetensors") == 2
    assert "give --to comfy" in capsys.readouterr().err
    wrong = tmp_path / "x.txt"
    assert main("lora", tmp_path / "l.safetensors", "--to", "diffusers", "--output", wrong) == 2
    assert "give a name in .safetensors" in capsys.readouterr().err and not wrong.exists()
