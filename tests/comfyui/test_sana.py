"""Sana, Sprint and their files in a real ComfyUI: the engine's latents, whatever loads, samples and saves."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import comfyui_files as files
import pytest
import sana_files as sana
import torch
from comfyui_graphs import node, with_model_node
from comfyui_server import GraphError, Server, at_least
from support import rel_err

pytestmark = pytest.mark.comfyui

Run = Callable[[dict], torch.Tensor]


@pytest.fixture(scope="session")
def sana_models(server: Server) -> Path:
    """ComfyUI's models folder, with Sana's tiny models and LoRAs in it."""
    models = server.base / "models"
    sana.write(models)
    state = {
        key: value.flatten(1) if value.shape[2:] == (1, 1) else value for key, value in sana.dit_state(sana.DIT).items()
    }
    blocks = {key: value for key, value in state.items() if key.startswith("transformer_blocks.")}
    for name, spelling in (("sana_comfy", "diffusion_model.{}"), ("sana_diffusers", "transformer.{}")):
        files.save_file(files.lora(blocks, spelling), models / "loras" / f"{name}.safetensors")
    return models


@pytest.fixture
def engine(sana_models: Path, tmp_path: Path) -> Run:
    """The same graph in the embedded engine, on the same files."""
    import nativedit

    def run(graph: dict) -> torch.Tensor:
        result = nativedit.run(graph, models_dir=sana_models, output_dir=tmp_path, progress=False)
        source, output = graph["save"]["inputs"]["samples"]
        return result.outputs[source][output]["samples"]

    return run


def with_lora(file: str) -> dict:
    return with_model_node(sana.graph(), "lora", "LoraLoaderModelOnly", lora_name=file, strength_model=0.5)


def with_auto(graph: dict) -> dict:
    """Sampled by the node that knows the publisher's settings."""
    inputs = graph["sampler"]["inputs"]
    kept = {key: inputs[key] for key in ("model", "positive", "negative", "latent_image", "seed")}
    open_ = {"steps": 0, "cfg": -1.0, "sampler_name": "auto", "scheduler": "auto", "shift": 0.0, "denoise": 1.0}
    return {**graph, "sampler": node("NativeDiTSample", **kept, **open_)}


GRAPHS = {
    "plain": sana.graph(),
    "published settings": sana.graph(sampler="dpmpp_2m", steps=6),
    "negative prompt": sana.with_negative(sana.graph(), "(Blurry:1.3), ugly"),
    "weighted prompt": sana.graph(prompt="a (Red:1.4) circle [above] a square"),
    "sprint, 1 step": sana.sprint_graph(steps=1),
    "sprint": sana.sprint_graph(),
    "sprint, 4 steps": sana.sprint_graph(steps=4, batch=2),
    "sprint, guided": sana.with_guidance(sana.sprint_graph(), 2.0),
    "sprint, auto": with_auto(sana.sprint_graph()),
    "sprint, image to image": sana.sprint_graph(denoise=0.5),
    "4k": sana.graph(model="sana_4k.safetensors"),
    "lora": with_lora("sana_comfy.safetensors"),
    "lora of diffusers": with_lora("sana_diffusers.safetensors"),
    "the example": sana.example("sana"),
    "sprint's example": sana.example("sana_sprint"),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_latent_is_the_engines(latent: Run, engine: Run, name: str):
    ours = latent(GRAPHS[name])

    assert ours.std() > 0.1
    assert rel_err(ours, engine(GRAPHS[name])) <= 1e-4


def test_a_lora_changes_the_1x1_convolutions_too(sana_models: Path, latent: Run):
    state = files.tensors(sana_models / "loras" / "sana_comfy.safetensors")
    only = {key: value for key, value in state.items() if ".ff." in key}
    assert only
    files.save_file(only, sana_models / "loras" / "sana_ff.safetensors")

    assert rel_err(latent(with_lora("sana_ff.safetensors")), latent(sana.graph())) > 1e-2


@pytest.mark.parametrize(("file", "same"), [("sana.pth", sana.MODEL), ("sana_4k.pth", "sana_4k.safetensors")])
def test_the_publishers_pickle_is_no_pixart(server: Server, sana_models: Path, latent: Run, file: str, same: str):
    result, log = server.log_during(lambda: latent(sana.graph(model=file)))

    assert "PixArt" not in log and "unet unexpected" not in log
    assert torch.equal(result, latent(sana.graph(model=same)))


def saved_by(server: Server, kind: str, graph: dict, **inputs: str) -> str:
    """A model saved by a node, moved to where loaders look for it."""
    source = graph["sampler"]["inputs"]["model"][0]
    graph = {"model": graph["model"], "saver": node(kind, model=[source, 0], **inputs)}
    before = set((server.base / "output").rglob("*.safetensors"))
    server.run(graph)
    [saved] = set((server.base / "output").rglob("*.safetensors")) - before
    name = f"sana_saved_{len(list(server.models('diffusion_models').iterdir()))}.safetensors"
    shutil.move(saved, server.models("diffusion_models") / name)
    return name


@pytest.mark.parametrize("file", [sana.MODEL, sana.SPRINT_MODEL, "sana_4k.safetensors"])
def test_a_model_saved_by_comfyui_is_the_same_model(server: Server, sana_models: Path, latent: Run, file: str):
    """The position table of 4K, which no shape tells, travels with it."""
    graph = sana.sprint_graph() if file == sana.SPRINT_MODEL else sana.graph(model=file)

    saved = saved_by(server, "ModelSave", graph, filename_prefix="sana")

    assert torch.equal(
        latent({**graph, "model": node("UNETLoader", unet_name=saved, weight_dtype="default")}), latent(graph)
    )
    shapes = files.tensors(server.models("diffusion_models") / saved)
    assert shapes[files.PREFIX + "transformer_blocks.0.ff.conv_point.weight"].ndim == 4


# How far a latent may be from the source's.
ERRORS = {
    "float8_e4m3fn": 0.2,
    "float8_e5m2": 0.4,
    "mxfp8": 0.2,
    "nvfp4": 0.6,
    "int8_tensorwise": 0.1,
    "int8_convrot": 0.1,
    "convrot_w4a4": 0.9,
    "asym_w4a8_int8": 0.6,
}


@pytest.mark.parametrize(("format", "error"), ERRORS.items(), ids=list(ERRORS))
def test_a_quantized_model_is_loaded_saved_and_loaded_again(
    server: Server, sana_models: Path, latent: Run, format: str, error: float
):
    import nativedit
    from nativedit.quant.formats import FORMATS, parse_recipe

    if not at_least(server.comfyui, FORMATS[parse_recipe(format).format].since["linear"]):
        pytest.skip(f"this ComfyUI has no {format}")

    beforehand = f"sana_{format}.safetensors"
    nativedit.quantize(
        sana_models / "diffusion_models" / sana.MODEL, sana_models / "diffusion_models" / beforehand, format=format
    )
    graph = sana.graph(model=beforehand, cfg=1.0)
    loaded = latent(graph)

    assert 1e-4 < rel_err(loaded, latent(sana.graph(cfg=1.0))) < error
    on_load = {
        **graph,
        "model": node("NativeDiTLoadDiffusionModel", file=sana.MODEL, architecture="auto", precision=format),
    }
    assert rel_err(latent(on_load), loaded) <= 1e-5  # weights elsewhere in memory, sums in another order
    saved = saved_by(server, "ModelSave", graph, filename_prefix="sana_quantized")
    stored = files.tensors(sana_models / "diffusion_models" / saved)
    for key, value in files.tensors(sana_models / "diffusion_models" / beforehand).items():
        assert torch.equal(stored[files.PREFIX + key].float(), value.float()), key
    again = latent({**graph, "model": node("UNETLoader", unet_name=saved, weight_dtype="default")})
    assert rel_err(again, loaded) <= 1e-5


def test_a_model_is_quantized_in_the_graph(server: Server, sana_models: Path, latent: Run):
    if not at_least(server.comfyui, "0.29.0"):
        pytest.skip("this ComfyUI has no int8_tensorwise")
    graph = with_model_node(
        sana.graph(cfg=1.0), "int8", "NativeDiTQuantizeModel", format="int8_tensorwise", policy="card", keep=""
    )

    assert 1e-4 < rel_err(latent(graph), latent(sana.graph(cfg=1.0))) < 0.1


@pytest.fixture(scope="session")
def picture(server: Server) -> str:
    from PIL import Image

    Image.new("RGB", (256, 192), (200, 30, 90)).save(server.base / "input" / "sana.png")
    return "sana.png"


def encoding(picture: str, vae: str = sana.VAE, **tiles: int) -> dict:
    return {
        "image": node("LoadImage", image=picture),
        "vae": node("VAELoader", vae_name=vae),
        "encode": node(
            "VAEEncodeTiled", pixels=["image", 0], vae=["vae", 0], temporal_size=64, temporal_overlap=8, **tiles
        ),
        "save": node("SaveLatent", samples=["encode", 0], filename_prefix="sana"),
    }


@pytest.mark.parametrize(("tile", "overlap"), [(64, 16), (96, 32), (64, 32), (64, 64)])
def test_tiles_that_no_latent_pixel_fits_are_refused(
    server: Server, sana_models: Path, picture: str, tile: int, overlap: int
):
    with pytest.raises(GraphError, match=r"tiles must be multiples of 64, the overlap a multiple of 32"):
        server.run(encoding(picture, tile_size=tile, overlap=overlap))


@pytest.mark.parametrize(("tile", "overlap"), [(128, 32), (512, 64)])
def test_other_tiles_give_a_latent(latent: Run, sana_models: Path, picture: str, tile: int, overlap: int):
    made = latent(encoding(picture, tile_size=tile, overlap=overlap))

    assert made.shape == (1, 32, 6, 8)
    assert made.isfinite().all()


def test_the_publishers_autoencoder_is_the_same(latent: Run, sana_models: Path, picture: str):
    tiles = {"tile_size": 512, "overlap": 64}

    made = latent(encoding(picture, sana.PUBLISHERS_VAE, **tiles))

    assert rel_err(made, latent(encoding(picture, **tiles))) <= 1e-6
