"""Quantized files change their layout without being quantized anew."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_module, write_folder

from nativedit.checkpoints.convert import convert
from nativedit.files import FileError, open_source
from nativedit.quant.convert import quantize
from nativedit.quant.dequantize import dequantize
from nativedit.quant.describe import describe
from nativedit.supported_models import get_architecture

pytest.importorskip("diffusers")
pytestmark = pytest.mark.usefixtures("single_thread")

FORMATS = ("float8_e4m3fn", "int8_convrot", "mxfp8", "nvfp4", "convrot_w4a4", "asym_w4a8_int8:codebook=no")


def quantized_file(tmp_path, row: str, card: str, recipe: str):
    """A comfy file with the card's layers quantized."""
    convert(write_folder(tmp_path / "there", tiny_module(row), dtype=torch.bfloat16), tmp_path / "float.safetensors")
    policy = get_architecture(card).quantization
    report = quantize(
        tmp_path / "float.safetensors", tmp_path / "quant.safetensors", format=recipe, card_policy=policy, device="cpu"
    )
    assert report.quantized
    return tmp_path / "quant.safetensors"


def equal_files(first, second) -> list[str]:
    """Names of tensors that differ."""
    first, second = load_file(first), load_file(second)
    assert first.keys() == second.keys()
    return [
        k
        for k in first
        if not torch.equal(first[k].reshape(-1).view(torch.uint8), second[k].reshape(-1).view(torch.uint8))
    ]


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize(("row", "card"), [("flux_dev", "flux"), ("z_image", "z_image"), ("lumina2", "lumina2")])
def test_split_and_fused_again_every_bit_is_back(row, card, recipe, tmp_path):
    file = quantized_file(tmp_path, row, card, recipe)
    convert(file, tmp_path / "split", layout="diffusers")
    convert(tmp_path / "split", tmp_path / "again.safetensors")
    assert equal_files(tmp_path / "again.safetensors", file) == []


@pytest.mark.parametrize("recipe", FORMATS)
def test_the_pieces_dequantize_to_the_rows_of_the_whole(recipe, tmp_path):
    file = quantized_file(tmp_path, "flux_dev", "flux", recipe)
    convert(file, tmp_path / "split", layout="diffusers")
    dequantize(tmp_path / "split", tmp_path / "plain", dtype="float32")
    dequantize(file, tmp_path / "plain.safetensors", dtype="float32")
    convert(tmp_path / "plain.safetensors", tmp_path / "expected", layout="diffusers")
    with open_source(tmp_path / "plain") as pieces, open_source(tmp_path / "expected") as rows:
        assert set(pieces) == set(rows)
        for key in rows:
            torch.testing.assert_close(pieces.read(key).float(), rows.read(key).float(), rtol=0, atol=1e-6, msg=key)


def test_swapped_halves_of_a_quantized_layer_are_moved_too(tmp_path):
    """MiniMax-H3's first feed-forward layer is quantized, and its halves change places."""
    file = quantized_file(tmp_path, "minimax_h3", "minimax_h3", "float8_e4m3fn")
    assert any("mlp.fc1" in layer.name for layer in describe(file).layers)
    convert(file, tmp_path / "split", layout="diffusers")
    convert(tmp_path / "split", tmp_path / "again.safetensors")
    assert equal_files(tmp_path / "again.safetensors", file) == []


def test_our_record_follows_the_new_names(tmp_path):
    file = quantized_file(tmp_path, "flux_dev", "flux", "int8_convrot")
    convert(file, tmp_path / "split", layout="diffusers")
    info = describe(tmp_path / "split")
    assert info.problems == () and info.record["format"] == describe(file).record["format"]
    assert "transformer_blocks.0.attn.to_q" in {layer.name for layer in info.layers}


def test_q_in_one_format_and_k_in_another_cannot_be_one_layer(tmp_path):
    file = quantized_file(tmp_path, "lumina2", "lumina2", "float8_e4m3fn")
    convert(file, tmp_path / "split", layout="diffusers")
    convert(tmp_path / "float.safetensors", tmp_path / "plain", layout="diffusers")
    state = load_file(tmp_path / "split/diffusion_pytorch_model.safetensors")
    plain = load_file(tmp_path / "plain/diffusion_pytorch_model.safetensors")
    name = "layers.0.attn.to_k"
    for key in [key for key in state if key.startswith(name + ".")]:
        del state[key]
    state[f"{name}.weight"] = plain[f"{name}.weight"]
    save_file(state, tmp_path / "mixed.safetensors")
    with pytest.raises(FileError, match=r"'layers\.0\.attention\.qkv' joins quantized weights and one that is not"):
        convert(tmp_path / "mixed.safetensors", tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
