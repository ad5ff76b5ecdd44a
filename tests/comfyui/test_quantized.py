"""Quantized checkpoints of our models go through ComfyUI's own layers, in the formats that this ComfyUI has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import node, text_to_latent, with_model_node
from comfyui_server import GraphError, Server, at_least
from support import rel_err

pytestmark = pytest.mark.comfyui

SINCE = {"float8_e4m3fn": "0.8.0", "int8_tensorwise": "0.29.0"}
DTYPE = {"float8_e4m3fn": (torch.float8_e4m3fn, 448.0), "int8_tensorwise": (torch.int8, 127.0)}


def quantized(state: dict[str, torch.Tensor], name: str, patterns: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Weights of layers whose name contains a pattern, with one scale each, as ComfyUI's own files have it."""
    dtype, largest = DTYPE[name]
    marker = torch.tensor(list(json.dumps({"format": name}).encode()), dtype=torch.uint8)
    result = {}
    for key, value in state.items():
        layer = key.removesuffix(".weight")
        if value.ndim != 2 or layer == key or not any(pattern in key for pattern in patterns):
            result[key] = value
            continue
        scale = value.abs().max() / largest
        codes = value / scale
        result[key] = (codes.round() if dtype == torch.int8 else codes).to(dtype)
        result[f"{layer}.weight_scale"] = scale
        result[f"{layer}.comfy_quant"] = marker.clone()
    return result


BLOCKS = ("attention.img_qkv", "gate_proj", "up_proj", "down_proj")


def write_dit(server: Server, name: str) -> str:
    file = f"tiny_{name}.safetensors"
    files.save_file(quantized(files.dit_state(), name, BLOCKS), server.models("diffusion_models") / file)
    return file


def skip_unless_known(server: Server, name: str) -> None:
    if not at_least(server.comfyui, SINCE[name]):
        pytest.skip(f"this ComfyUI has no {name}")


@pytest.mark.parametrize(("name", "error"), [("float8_e4m3fn", 0.1), ("int8_tensorwise", 0.05)])
def test_a_quantized_model_samples_close_to_its_source(server: Server, latent: Callable, name: str, error: float):
    skip_unless_known(server, name)
    file = write_dit(server, name)
    plain = latent(text_to_latent(cfg=1.0))

    quantized_latent = latent(text_to_latent(model=file, cfg=1.0))

    assert 1e-4 < rel_err(quantized_latent, plain) < error


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8_tensorwise"])
def test_a_quantized_model_takes_a_lora_and_survives_saving(server: Server, latent: Callable, name: str):
    skip_unless_known(server, name)
    file = write_dit(server, name)
    graph = {
        "model": node("UNETLoader", unet_name=file, weight_dtype="default"),
        "save": node("ModelSave", model=["model", 0], filename_prefix="quantized"),
    }
    before = set((server.base / "output").rglob("*.safetensors"))
    server.run(graph)
    [saved] = set((server.base / "output").rglob("*.safetensors")) - before
    shutil.move(saved, server.models("diffusion_models") / "saved_quantized.safetensors")
    lora = {"lora_name": "dit_comfy.safetensors", "strength_model": 1.0}

    def with_lora(model: str) -> dict:
        return with_model_node(text_to_latent(model=model, cfg=1.0), "lora", "LoraLoaderModelOnly", **lora)

    result, log = server.log_during(lambda: latent(with_lora("saved_quantized.safetensors")))

    saved_weights = files.tensors(server.models("diffusion_models") / "saved_quantized.safetensors")
    for key, value in files.tensors(server.models("diffusion_models") / file).items():
        assert torch.equal(saved_weights[files.PREFIX + key].float(), value.float()), key
    # ComfyUI rounds a patched weight back to its codes at random.
    assert rel_err(result, latent(with_lora(file))) < 0.02
    assert rel_err(result, latent(text_to_latent(model=file, cfg=1.0))) > 1e-2
    assert "lora key not loaded" not in log


def test_a_format_that_this_comfyui_lacks_is_one_sentence(server: Server):
    if at_least(server.comfyui, SINCE["int8_tensorwise"]):
        pytest.skip("this ComfyUI has int8_tensorwise")
    graph = text_to_latent(model=write_dit(server, "int8_tensorwise"))

    with pytest.raises(GraphError, match=r"quantized as int8_tensorwise, which ComfyUI .* it needs ComfyUI 0\.\d+"):
        server.run(graph)


def test_weights_cast_to_fp8_on_load_still_make_a_picture(latent: Callable):
    graph = text_to_latent(cfg=1.0)
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"

    assert rel_err(latent(graph), latent(text_to_latent(cfg=1.0))) < 0.3


@pytest.mark.parametrize("own_clip_loader", [True, False], ids=["our loader", "core's loader"])
@pytest.mark.parametrize("embedding", [False, True], ids=["layers", "layers and embedding"])
def test_a_quantized_text_encoder_encodes_close_to_its_source(
    server: Server, latent: Callable, embedding: bool, own_clip_loader: bool
):
    skip_unless_known(server, "int8_tensorwise")
    patterns = ("mlp.", "self_attn.q_proj", *(["embed_tokens"] if embedding else []))
    state = {**quantized(files.text_state(), "int8_tensorwise", patterns), **files.tokenizer_tensor()}
    files.save_file(state, server.models("text_encoders") / "text_int8.safetensors", files.FOR_PRX_PIXEL)
    graph = text_to_latent(clip="text_int8.safetensors", cfg=1.0, own_clip_loader=own_clip_loader)

    assert 1e-5 < rel_err(latent(graph), latent(text_to_latent(cfg=1.0))) < 0.05


def test_a_quantized_embedding_is_refused_where_comfyui_has_none(server: Server):
    if at_least(server.comfyui, "0.21.0"):
        pytest.skip("this ComfyUI holds quantized embeddings")
    state = {**quantized(files.text_state(), "float8_e4m3fn", ("embed_tokens",)), **files.tokenizer_tensor()}
    files.save_file(state, server.models("text_encoders") / "text_fp8_embedding.safetensors", files.FOR_PRX_PIXEL)

    with pytest.raises(GraphError, match=r"'embed_tokens' is quantized .* can't hold a quantized Embedding"):
        server.run(text_to_latent(clip="text_fp8_embedding.safetensors"))
