"""Bad input is one clear error: the file, what it is or lacks, and what to do."""

from __future__ import annotations

import pytest
from comfyui_graphs import node, own_text_encoder, text_to_latent
from comfyui_server import GraphError, Server

pytestmark = pytest.mark.comfyui

OURS, CORES = "NativeDiTLoadDiffusionModel", "UNETLoader"


def load_model(file: str, loader: str = OURS) -> dict:
    graph = text_to_latent(model=file, loader=loader)
    return {"model": graph["model"], "end": node("ModelSave", model=["model", 0], filename_prefix="never")}


def load_text(file: str, own: bool = True) -> dict:
    loader = node("CLIPLoader", clip_name=file, type="stable_diffusion")
    clip = own_text_encoder(file) if own else loader
    return {"clip": clip, "end": node("CLIPSave", clip=["clip", 0], filename_prefix="never")}


def error_of(server: Server, graph: dict) -> GraphError:
    with pytest.raises(GraphError) as raised:
        server.run(graph)
    return raised.value


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("truncated.safetensors", ("truncated.safetensors", "bytes")),
        ("lfs_pointer.safetensors", ("Git LFS pointer",)),
        ("web_page.safetensors", ("web page",)),
        ("missing_layer.safetensors", ("1 weights are missing: blocks.1.gate_proj.weight",)),
        ("wrong_shape.safetensors", ("blocks.1.gate_proj.weight is [100, 64], expected [128, 64]",)),
        ("scale_without_marker.safetensors", ("blocks.1.gate_proj.weight_scale",)),
        ("a_text_encoder.safetensors", ("is a text encoder", "models/text_encoders", "Load Text Encoder")),
        ("a_lora.safetensors", ("is a LoRA", "models/loras", "Load LoRA")),
        ("a_vae.safetensors", ("is an autoencoder", "models/vae", "Load VAE")),
        ("unknown.safetensors", ("no kind of model",)),
    ],
)
def test_our_loader_says_what_is_wrong_with_a_diffusion_model(server: Server, file: str, says: tuple[str, ...]):
    error = error_of(server, load_model(file))

    assert error.node == "model"
    assert file in error.message
    assert all(part in error.message for part in says), error.message


def test_a_prompt_weight_that_is_no_number_is_an_error_of_its_node(server: Server):
    error = error_of(server, text_to_latent(prompt="a (red:inf) cube"))

    assert error.node == "positive"
    assert "gives 'red' a weight of inf" in error.message


@pytest.mark.parametrize("file", ["missing_layer.safetensors", "wrong_shape.safetensors"])
def test_comfyuis_loader_refuses_our_damaged_models_with_the_same_words(server: Server, file: str):
    error = error_of(server, load_model(file, CORES))

    assert file in error.message
    assert "blocks.1.gate_proj.weight" in error.message


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("a_diffusion_model.safetensors", ("is a diffusion model", "models/diffusion_models")),
        ("missing_layer.safetensors", ("1 weights are missing: layers.1.mlp.up_proj.weight",)),
        ("no_tokenizer.safetensors", ("has no tokenizer", "no_tokenizer.tokenizer.json")),
        ("whose_prompts.safetensors", ("prx_pixel", "choose one as architecture")),
    ],
)
def test_our_loader_says_what_is_wrong_with_a_text_encoder(server: Server, file: str, says: tuple[str, ...]):
    error = error_of(server, load_text(file))

    assert error.node == "clip"
    assert file in error.message
    assert all(part in error.message for part in says), error.message


@pytest.mark.parametrize("file", ["missing_layer.safetensors", "no_tokenizer.safetensors"])
def test_comfyuis_loader_refuses_our_damaged_text_encoders_too(server: Server, file: str):
    assert file in error_of(server, load_text(file, own=False)).message


def test_a_size_that_the_patches_do_not_divide_is_refused_with_one_that_they_do(server: Server):
    graph = text_to_latent(size=(68, 48))

    error = error_of(server, graph)

    assert error.node == "latent"
    assert "width 68 is not a multiple of 8" in error.message
    assert "64" in error.message


def test_a_missing_file_is_refused_before_anything_runs(server: Server):
    error = error_of(server, load_model("not_there.safetensors"))

    assert error.node == "model"
    assert "not_there.safetensors" in error.message
