"""What ComfyUI's save nodes write of our models loads again, everywhere, with the same numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import from_checkpoint, node, own_text_encoder, text_to_latent, with_model_node
from comfyui_server import Server

pytestmark = pytest.mark.comfyui


def written(server: Server, before: set[Path]) -> list[Path]:
    return sorted(set((server.base / "output").rglob("*.safetensors")) - before)


def save(server: Server, graph: dict) -> list[Path]:
    before = set((server.base / "output").rglob("*.safetensors"))
    server.run(graph)
    return written(server, before)


def save_model(server: Server, model: str, name: str) -> None:
    """Through ModelSave into the models folder."""
    graph = {
        "model": node("UNETLoader", unet_name=model, weight_dtype="default"),
        "save": node("ModelSave", model=["model", 0], filename_prefix="model"),
    }
    [file] = save(server, graph)
    shutil.move(file, server.models("diffusion_models") / name)


def test_a_saved_model_loads_again(server: Server, latent: Callable):
    save_model(server, "tiny.safetensors", "saved_tiny.safetensors")

    assert torch.equal(latent(text_to_latent(model="saved_tiny.safetensors")), latent(text_to_latent()))
    saved = files.tensors(server.models("diffusion_models") / "saved_tiny.safetensors")
    assert saved.keys() == {files.PREFIX + key for key in files.dit_state()}, "nothing is added that shapes tell"


def test_a_configuration_that_shapes_do_not_tell_survives_saving_twice(server: Server, latent: Callable):
    save_model(server, "odd.safetensors", "saved_odd.safetensors")
    save_model(server, "saved_odd.safetensors", "saved_odd_again.safetensors")

    result, log = server.log_during(lambda: latent(text_to_latent(model="saved_odd_again.safetensors")))

    assert torch.equal(result, latent(text_to_latent(model="odd.safetensors")))
    assert "unet unexpected" not in log


def test_a_saved_model_with_a_lora_holds_it(server: Server, latent: Callable):
    with_lora = with_model_node(
        text_to_latent(), "lora", "LoraLoaderModelOnly", lora_name="dit_comfy.safetensors", strength_model=1.0
    )
    graph = {key: with_lora[key] for key in ("model", "lora")}
    graph["save"] = node("ModelSave", model=["lora", 0], filename_prefix="merged")
    [file] = save(server, graph)
    shutil.move(file, server.models("diffusion_models") / "saved_lora.safetensors")

    difference = latent(text_to_latent(model="saved_lora.safetensors")) - latent(with_lora)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("own_clip_loader", [True, False], ids=["our loader", "core's loader"])
@pytest.mark.parametrize("name", ["tiny_text.safetensors", "odd_text.safetensors"])
def test_a_saved_text_encoder_loads_again_with_its_tokenizer(
    server: Server, latent: Callable, name: str, own_clip_loader: bool
):
    graph = {
        "clip": own_text_encoder(name),
        "save": node("CLIPSave", clip=["clip", 0], filename_prefix="clip"),
    }
    [file] = save(server, graph)
    shutil.move(file, server.models("text_encoders") / "saved_text.safetensors")

    again = text_to_latent(clip="saved_text.safetensors", own_clip_loader=own_clip_loader)

    assert torch.equal(latent(again), latent(text_to_latent(clip=name)))


def test_a_saved_checkpoint_loads_again(server: Server, latent: Callable):
    graph = {
        "model": node("UNETLoader", unet_name="odd.safetensors", weight_dtype="default"),
        "clip": own_text_encoder("tiny_text.safetensors"),
        "vae": node("VAELoader", vae_name="pixel_space"),
        "save": node("CheckpointSave", model=["model", 0], clip=["clip", 0], vae=["vae", 0], filename_prefix="all"),
    }
    [file] = save(server, graph)
    shutil.move(file, server.models("checkpoints") / "saved_all.safetensors")

    result, log = server.log_during(lambda: latent(from_checkpoint("saved_all.safetensors")))

    assert torch.equal(result, latent(text_to_latent(model="odd.safetensors")))
    assert "missing" not in log


def test_the_package_loads_what_comfyui_saved(server: Server):
    import nativedit

    save_model(server, "odd.safetensors", "saved_for_package.safetensors")

    module = nativedit.load_diffusion_model(server.models("diffusion_models") / "saved_for_package.safetensors")

    assert (tuple(module.axes_dim), module.theta) == (files.ODD["axes_dim"], files.ODD["theta"])
    expected = files.dit_state(files.ODD)
    assert all(torch.equal(value, expected[key]) for key, value in module.state_dict().items())
