"""This pack's own models: from the published folder to one file and back, checked against the module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import Golden, golden_cases

from nativedit.checkpoints.convert import convert
from nativedit.checkpoints.load import load_diffusion_model
from nativedit.files import FileError, open_source

pytestmark = pytest.mark.usefixtures("single_thread")

CASES = [golden_cases(name)[0] for name in ("prx", "prx_pixel", "sana", "cogview4", "flite")]
# one with experts
CASES += [next(case for case in golden_cases("nucleus_moe_image") if case.folder.name == "moe_masked")]
goldens = pytest.mark.parametrize("golden", CASES, ids=str)


def published(golden: Golden, folder: Path) -> Path:
    """The recorded weights as their publisher would lay them out, with config.json."""
    folder.mkdir()
    save_file(golden.weights, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"_class_name": "Published", **golden.config}))
    return folder


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Keys that differ in presence, shape, type or value."""
    return sorted(first.keys() ^ second.keys()) + [
        key for key in first.keys() & second.keys()
        if first[key].shape != second[key].shape or first[key].dtype != second[key].dtype
        or not torch.equal(first[key], second[key])
    ]  # fmt: skip


@goldens
def test_a_published_folder_becomes_one_file_that_needs_no_folder(golden, tmp_path):
    folder = published(golden, tmp_path / "there")
    convert(folder, tmp_path / "model.safetensors")
    expected, loaded = load_diffusion_model(folder), load_diffusion_model(tmp_path / "model.safetensors")
    assert type(loaded) is type(expected) and equal(loaded.state_dict(), expected.state_dict()) == []


@goldens
def test_what_the_publisher_says_about_its_own_code_alone_does_not_keep_the_file_from_loading(golden, tmp_path):
    folder = published(golden, tmp_path / "there")
    said = json.loads((folder / "config.json").read_text()) | {"dropout": 0.0, "use_grouped_mm": True}
    (folder / "config.json").write_text(json.dumps(said))

    convert(folder, tmp_path / "model.safetensors")
    load_diffusion_model(tmp_path / "model.safetensors")

    convert(tmp_path / "model.safetensors", tmp_path / "back", layout="diffusers")
    assert json.loads((tmp_path / "back/config.json").read_text()) == said


@goldens
def test_and_comes_back_as_it_was_published(golden, tmp_path):
    folder = published(golden, tmp_path / "there")
    convert(folder, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", tmp_path / "back", layout="diffusers")
    assert equal(load_file(tmp_path / "back/diffusion_pytorch_model.safetensors"), golden.weights) == []
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((folder / "config.json").read_text())


@goldens
def test_a_weight_of_another_shape_is_named(golden, tmp_path):
    folder = published(golden, tmp_path / "there")
    key = next(key for key, value in golden.weights.items() if value.ndim == 1 and value.numel() > 3 and ".1." in key)
    save_file({**golden.weights, key: golden.weights[key][:-1].clone()}, folder / "diffusion_pytorch_model.safetensors")
    with pytest.raises(FileError):
        convert(folder, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_the_configuration_is_in_the_header(tmp_path):
    golden = CASES[1]
    convert(published(golden, tmp_path / "there"), tmp_path / "model.safetensors")
    with open_source(tmp_path / "model.safetensors") as source:
        config = json.loads(source.metadata["config"])["transformer"]
    assert {key: config[key] for key in golden.config} == golden.config
