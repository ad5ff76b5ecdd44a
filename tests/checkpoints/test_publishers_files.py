"""CogView4 and F-Lite as their publishers lay them out: trainers' pickles, and a repository with a folder of its own
name for the transformer."""

from __future__ import annotations

import json
from pathlib import Path

import cogview4_files as cogview4
import f_lite_files as f_lite
import pytest
import torch
from safetensors.torch import load_file, save_file
from sat_layout import as_sat

import nativedit
from nativedit.ldm.f_lite.model import ROPE_BUFFERS

pytestmark = pytest.mark.usefixtures("single_thread")

TABLES = {name: torch.zeros(2, 2, 8) for name in ROPE_BUFFERS}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_cogview4_of_its_trainer_becomes_the_published_one(tmp_path: Path):
    wide = cogview4.dit_state(config=cogview4.WIDE_DIT)
    weights = {key: value.clone() for key, value in as_sat(wide, cogview4.DIT["num_layers"]).items()}
    torch.save({"module": weights, "global_steps": 3}, tmp_path / "mp_rank_00_model_states.pt")

    nativedit.convert(tmp_path / "mp_rank_00_model_states.pt", tmp_path / "model.safetensors")

    assert same(load_file(tmp_path / "model.safetensors"), wide)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_f_lite_of_its_trainer_becomes_a_file_without_tables(tmp_path: Path, prefix: str):
    state = f_lite.dit_state()
    torch.save({prefix + key: value for key, value in (state | TABLES).items()}, tmp_path / "model.pt")

    nativedit.convert(tmp_path / "model.pt", tmp_path / "model.safetensors")

    assert same(load_file(tmp_path / "model.safetensors"), state)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "F-Lite"
    for name in ("dit_model", "text_encoder", "tokenizer"):
        (folder / name).mkdir(parents=True)
    save_file(f_lite.dit_state() | TABLES, folder / "dit_model" / "diffusion_pytorch_model.safetensors")
    (folder / "dit_model" / "config.json").write_text(
        json.dumps({"_class_name": "DiT", "use_rope": True, **f_lite.DIT})
    )
    save_file(f_lite.text_state(), folder / "text_encoder" / "model.safetensors")
    for name, file in (("tokenizer_json", "tokenizer.json"), ("tokenizer_config", "tokenizer_config.json")):
        (folder / "tokenizer" / file).write_bytes(bytes(f_lite.tokenizer_tensors()[name].numpy()))
    index = {"_class_name": "FLitePipeline", "dit_model": ["f_lite", "DiT"]}
    index |= {"text_encoder": ["transformers", "T5EncoderModel"], "tokenizer": ["transformers", "T5TokenizerFast"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("part", ["", "dit_model"])
def test_the_transformer_of_f_lites_repository_loads_and_converts(repository: Path, tmp_path: Path, part: str):
    nativedit.convert(repository / part, tmp_path / "model.safetensors")

    assert same(load_file(tmp_path / "model.safetensors"), f_lite.dit_state())
    for source in (repository / part, tmp_path / "model.safetensors"):
        assert same(nativedit.load_diffusion_model(source).state_dict(), f_lite.dit_state())


def test_all_of_f_lites_repository_becomes_comfyuis_files(repository: Path, tmp_path: Path):
    nativedit.convert(repository, tmp_path / "models")

    assert same(load_file(tmp_path / "models/diffusion_models/F-Lite.safetensors"), f_lite.dit_state())
    text = load_file(tmp_path / "models/text_encoders/F-Lite.safetensors")
    assert "tokenizer_json" in text and same({key: text[key] for key in f_lite.text_state()}, f_lite.text_state())
