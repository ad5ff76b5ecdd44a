"""Autoencoders that ComfyUI has no module for, through its own loader and nodes."""

from __future__ import annotations

import shutil

import comfyui_files as files
import numpy as np
import pytest
import torch
from comfyui_graphs import node
from comfyui_server import GraphError, Server
from PIL import Image
from support import rel_err

pytestmark = pytest.mark.comfyui

KINDS = ("kl", "dc_ae")


@pytest.fixture(scope="session")
def picture(server: Server) -> torch.Tensor:
    """A picture in ComfyUI's input folder, as [1, 3, H, W] in [-1, 1]."""
    pixels = np.random.default_rng(1).integers(0, 256, (96, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(server.base / "input" / "noise.png")
    return torch.tensor(pixels).permute(2, 0, 1)[None].float() / 255 * 2 - 1


@pytest.fixture(scope="session", params=KINDS)
def vae(request: pytest.FixtureRequest, server: Server) -> str:
    """A file in models/vae; its name says the kind."""
    state = files.random_state(files.autoencoder(request.param, device="meta"), 6)
    files.save_file(state, server.models("vae") / f"{request.param}.safetensors")
    return request.param


def round_trip(file: str, encode: dict | None = None, decode: dict | None = None) -> dict:
    return {
        "image": node("LoadImage", image="noise.png"),
        "vae": node("VAELoader", vae_name=file),
        "encode": node(
            "VAEEncodeTiled" if encode else "VAEEncode", pixels=["image", 0], vae=["vae", 0], **encode or {}
        ),
        "decode": node(
            "VAEDecodeTiled" if decode else "VAEDecode", samples=["encode", 0], vae=["vae", 0], **decode or {}
        ),
        "latent": node("SaveLatent", samples=["encode", 0], filename_prefix="latents/vae"),
        "picture": node("SaveImage", images=["decode", 0], filename_prefix="vae"),
    }


def results(server: Server, graph: dict) -> tuple[torch.Tensor, np.ndarray]:
    outputs = server.run(graph)
    latent = files.tensors(server.file_of(outputs["latent"]["latents"][0]))["latent_tensor"]
    with Image.open(server.file_of(outputs["picture"]["images"][0])) as image:
        return latent, np.asarray(image.convert("RGB")).astype(int)


def module_of(kind: str) -> torch.nn.Module:
    module = files.autoencoder(kind)
    module.load_state_dict(files.random_state(module, 6))
    return module


@torch.inference_mode()
def test_encoding_and_decoding_are_those_of_the_module(server: Server, vae: str, picture: torch.Tensor):
    module = module_of(vae)

    latent, pixels = results(server, round_trip(f"{vae}.safetensors"))

    # ComfyUI chooses the autoencoder's dtype by the device: bfloat16 or float32.
    assert rel_err(latent, module.encode(picture)) < 0.05
    expected = (module.decode(latent)[0].permute(1, 2, 0) + 1).div(2).clamp(0, 1) * 255
    assert np.abs(pixels - expected.numpy()).mean() < 3


def test_tiles_work(server: Server, vae: str, picture: torch.Tensor):
    tiles = {"tile_size": 64, "overlap": 32 if vae == "dc_ae" else 16, "temporal_size": 64, "temporal_overlap": 8}
    encode = None if vae == "dc_ae" else tiles  # 64 pixels are two of its latents: ComfyUI can't overlap those

    latent, pixels = results(server, round_trip(f"{vae}.safetensors", encode, tiles))

    assert latent.isfinite().all()
    assert pixels.shape == (96, 64, 3)


def test_a_saved_autoencoder_loads_again(server: Server, vae: str, picture: torch.Tensor):
    before = set((server.base / "output").rglob("*.safetensors"))
    graph = {
        "vae": node("VAELoader", vae_name=f"{vae}.safetensors"),
        "save": node("VAESave", vae=["vae", 0], filename_prefix="vae"),
    }
    server.run(graph)
    [saved] = set((server.base / "output").rglob("*.safetensors")) - before
    shutil.move(saved, server.models("vae") / f"saved_{vae}.safetensors")

    again, _ = results(server, round_trip(f"saved_{vae}.safetensors"))

    assert torch.equal(again, results(server, round_trip(f"{vae}.safetensors"))[0])


def test_a_damaged_autoencoder_is_refused_with_the_layers_name(server: Server, vae: str, picture: torch.Tensor):
    state = files.tensors(server.models("vae") / f"{vae}.safetensors")
    lost = next(key for key in state if "down_blocks.1." in key and key.endswith("weight") and state[key].ndim == 4)
    del state[lost]
    damaged = server.models("vae") / f"damaged_{vae}.safetensors"
    files.save_file(state, damaged)

    with pytest.raises(GraphError, match=r"1 weights are missing: encoder\.down_blocks\.1"):
        server.run(round_trip(damaged.name))
    damaged.unlink()  # other tests take whatever fits


def test_comfyuis_own_autoencoders_stay_its_own(server: Server, picture: torch.Tensor):
    _, log = server.log_during(lambda: server.run(round_trip("pixel_space")))

    assert "NativeDiT" not in log
