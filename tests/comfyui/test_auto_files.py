""" "auto" as a file in our loaders, on a running ComfyUI: its own folders, its own cache."""

from __future__ import annotations

from collections.abc import Callable

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import node, text_to_latent
from comfyui_server import GraphError, Server
from safetensors.torch import save_file

pytestmark = pytest.mark.comfyui

# A published name of PRXPixel, which the resolver prefers to other files that look alike.
NAME, TEXT = "prxpixel_t2i.safetensors", "qwen3_vl_embedding_2b.safetensors"


def graph(file: str = "auto", text: str = "auto", architecture: str = "prx_pixel") -> dict:
    made = text_to_latent(cfg=1.0, steps=2)
    stored = {"architecture": architecture, "precision": "as stored"}
    made["model"] = node("NativeDiTLoadDiffusionModel", file=file, **stored)
    made["clip"] = node("NativeDiTLoadTextEncoder", file=text, **stored)
    return made


def test_auto_is_the_file_by_name_and_a_changed_one_is_noticed(server: Server, latent: Callable):
    diffusion = server.models("diffusion_models") / "deep"
    diffusion.mkdir()
    save_file(files.dit_state(seed=31), diffusion / NAME)
    text = {**files.text_state(seed=32), **files.tokenizer_tensor()}
    save_file(text, server.models("text_encoders") / TEXT, files.FOR_PRX_PIXEL)

    automatic = latent(graph())

    assert torch.equal(latent(graph(f"deep/{NAME}", TEXT)), automatic)
    save_file(files.dit_state(seed=33), diffusion / NAME)
    assert not torch.equal(latent(graph()), automatic)


def test_what_is_missing_is_said_on_the_node(server: Server):
    missing = text_to_latent()
    # No test writes a file of Chroma.
    missing["model"] = node("NativeDiTLoadDiffusionModel", file="auto", architecture="chroma", precision="as stored")
    with pytest.raises(GraphError, match=r"auto for Chroma: is not among the models in .*\(diffusion_models") as raised:
        server.run(missing)
    assert raised.value.node == "model"
    with pytest.raises(GraphError, match="choose the architecture too"):
        server.run(graph(architecture="auto"))


def test_a_vae_is_found_by_its_header(server: Server):
    state = files.random_state(files.autoencoder("dc_ae"), 3)
    save_file(state, server.models("vae") / "whose.safetensors")
    loader = node("NativeDiTLoadVAE", file="auto", precision="auto", architecture="sana")
    save = node("NativeDiTSaveVAE", vae=["vae", 0], filename_prefix="auto_vae", precision="as stored")

    [file] = server.run({"vae": loader, "save": save})["save"]["files"]

    assert files.tensors(server.file_of(file)).keys() == state.keys()
