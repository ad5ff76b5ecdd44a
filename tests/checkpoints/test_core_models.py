"""Core's models in diffusers' classes: quantized, fused layers load split, compute, and are saved to the bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support import rel_err
from tiny_models import tiny_module, write_folder

from nativedit.checkpoints.convert import convert
from nativedit.quant.convert import quantize
from nativedit.supported_models import get_architecture

pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")


def same_bytes(first, second) -> list[str]:
    first, second = load_file(first), load_file(second)
    assert first.keys() == second.keys()
    return [
        key
        for key in first
        if first[key].dtype != second[key].dtype
        or not torch.equal(first[key].reshape(-1).view(torch.uint8), second[key].reshape(-1).view(torch.uint8))
    ]


@pytest.mark.parametrize("row", ["z_image", "flux2_dev", "wan21_i2v_14b"])
def test_a_file_in_comfyuis_layout_loads_into_diffusers_class(row, tmp_path):
    from nativedit.engine.core_models import load_core_model, save_core_model

    module = tiny_module(row)
    convert(write_folder(tmp_path / "there", module), tmp_path / "model.safetensors")
    loaded = load_core_model(tmp_path / "model.safetensors")
    assert type(loaded) is type(module)
    state, expected = loaded.state_dict(), module.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)
    save_core_model(loaded, tmp_path / "again.safetensors")
    assert same_bytes(tmp_path / "again.safetensors", tmp_path / "model.safetensors") == []


def test_shards_are_read_where_they_lie_each_opened_once(tmp_path, monkeypatch):
    from nativedit.engine.core_models import load_core_model
    from nativedit.files import source as source_module

    module = tiny_module("flux_schnell")
    folder = write_folder(tmp_path / "there", module, shards=3)
    before, opened = sorted(tmp_path.rglob("*")), []
    original = source_module._Part.__init__
    monkeypatch.setattr(
        source_module._Part, "__init__", lambda self, header: (opened.append(header.path), original(self, header))[1]
    )
    loaded = load_core_model(folder)
    assert all(torch.equal(value, module.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert len(opened) == len(set(opened)) == 3 and sorted(tmp_path.rglob("*")) == before


SPLIT = {
    "flux_dev": ("flux", "transformer_blocks.0.attn.to_q"),
    "z_image": ("z_image", "layers.0.attention.to_k"),
    "lumina2": ("lumina2", "layers.0.attn.to_v"),
}


@pytest.mark.parametrize("row", list(SPLIT))
@pytest.mark.parametrize("recipe", ["int8_convrot", "float8_e4m3fn", "nvfp4"])
def test_a_quantized_file_loads_split_and_is_saved_to_the_bit(recipe, row, tmp_path):
    from nativedit.engine.core_models import load_core_model, save_core_model

    card, part = SPLIT[row]
    module = tiny_module(row)
    convert(write_folder(tmp_path / "there", module, dtype=torch.bfloat16), tmp_path / "model.safetensors")
    policy = get_architecture(card).quantization
    file = tmp_path / "quantized.safetensors"
    quantize(tmp_path / "model.safetensors", file, format=recipe, card_policy=policy, device="cpu")
    loaded = load_core_model(file)
    assert type(loaded.get_submodule(part)).__module__.startswith("nativedit.quant")
    save_core_model(loaded, tmp_path / "again.safetensors")
    assert same_bytes(tmp_path / "again.safetensors", file) == []


def test_the_split_model_computes_what_the_float_model_does_up_to_its_quantization(tmp_path):
    from nativedit.engine.core_models import load_core_model

    module = tiny_module("flux_schnell")
    convert(write_folder(tmp_path / "there", module), tmp_path / "model.safetensors")
    policy = get_architecture("flux").quantization
    quantize(
        tmp_path / "model.safetensors",
        tmp_path / "q.safetensors",
        format="int8_convrot",
        card_policy=policy,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    inputs = {
        "hidden_states": draw(1, 12, 64),
        "encoder_hidden_states": draw(1, 5, 40),
        "pooled_projections": draw(1, 24),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(12, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    with torch.no_grad():
        expected = module(**inputs, return_dict=False)[0]
        actual = load_core_model(tmp_path / "q.safetensors")(**inputs, return_dict=False)[0]
    assert rel_err(actual, expected) < 0.05
