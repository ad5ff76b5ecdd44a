"""CogView4 in ComfyUI's graph: the engine's numbers, through our nodes and through ComfyUI's own."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cogview4_files as cogview4
import comfyui_files as files
import numpy as np
import pytest
import torch
from comfyui_graphs import Graph, node, own_text_encoder, with_model_node
from comfyui_server import Server
from PIL import Image
from support import rel_err

pytestmark = pytest.mark.comfyui

SIZES = [(96, 64), (64, 128)]


@pytest.fixture(scope="session")
def written(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny files, in ComfyUI's models folder and in one for the engine."""
    own = tmp_path_factory.mktemp("cogview4")
    for models in (server.base / "models", own):
        cogview4.write(models)
    return own


@pytest.fixture
def engine(written: Path, tmp_path: Path) -> Callable[[Graph], torch.Tensor]:
    """The engine's latent of a graph."""
    import nativedit

    def run(graph: Graph) -> torch.Tensor:
        result = nativedit.run(graph, models_dir=written, output_dir=tmp_path / "output", progress=False)
        source, output = graph["save"]["inputs"]["samples"]
        return result.outputs[source][output]["samples"]

    return run


def by_comfyuis_nodes(size: tuple[int, int] = SIZES[0], **sampler: Any) -> Graph:
    """The same picture by ComfyUI's own loaders and KSampler."""
    graph = cogview4.graph(size=size)
    graph["model"] = node("UNETLoader", unet_name=cogview4.NAMES["diffusion_models"], weight_dtype="default")
    graph["clip"] = node("CLIPLoader", clip_name=cogview4.NAMES["text_encoders"], type="stable_diffusion")
    graph["vae"] = node("VAELoader", vae_name=cogview4.NAMES["vae"])
    links = {key: graph["sampler"]["inputs"][key] for key in ("model", "positive", "negative", "latent_image")}
    settings = {"steps": 4, "cfg": 3.5, "sampler_name": "euler", "scheduler": "published", "denoise": 1.0, "seed": 7}
    graph["sampler"] = node("KSampler", **links, **{**settings, **sampler})
    return graph


@pytest.mark.parametrize("size", SIZES)
def test_with_every_setting_on_auto_the_latent_is_the_engines(latent, engine, size: tuple[int, int]):
    graph = cogview4.graph(size=size)

    made = latent(graph)

    assert made.shape == (1, 16, size[1] // 8, size[0] // 8)
    assert made.std() > 0.1
    assert rel_err(made, engine(graph)) <= 1e-4


def test_the_example_workflows_latent_is_the_engines(latent, engine):
    assert rel_err(latent(cogview4.example()), engine(cogview4.example())) <= 1e-4


def test_the_picture_is_decoded_and_carries_the_settings(server: Server, written: Path):
    outputs = server.run(cogview4.graph())

    assert outputs["sampler"]["text"] == ["4 steps, cfg 3.5, euler, published, shift 0.4796"]
    with Image.open(server.file_of(outputs["picture"]["images"][0])) as picture:
        assert picture.size == SIZES[0]
        assert np.asarray(picture).std() > 1
        kept = json.loads(picture.info["prompt"])["sampler"]
    assert kept["_meta"]["nativedit"]["scheduler"] == "published"
    assert kept["inputs"]["steps"] == 4


def test_comfyuis_loaders_and_ksampler_give_the_same_latent_at_every_size(latent, written: Path):
    for size in (*SIZES, SIZES[0]):  # the first one again: nothing of the second size is left in the model
        expected = latent(cogview4.graph(size=size))

        assert rel_err(latent(by_comfyuis_nodes(size)), expected) <= 1e-6


@pytest.mark.parametrize("scheduler", ["normal", "simple", "beta"])
def test_ordinary_schedules_follow_the_size_too(latent, engine, scheduler: str):
    graph = by_comfyuis_nodes(SIZES[1], scheduler=scheduler)
    graph["clip"] = own_text_encoder(cogview4.NAMES["text_encoders"])

    assert rel_err(latent(graph), engine(graph)) <= 1e-4


def test_a_shift_set_by_a_node_wins(latent, engine):
    plain = by_comfyuis_nodes()
    graph = with_model_node(plain, "patch", "ModelSamplingSD3", shift=2.5)
    ours = with_model_node(plain, "patch", "NativeDiTModelSampling", shift=2.5)

    assert rel_err(latent(graph), latent(plain)) > 1e-2
    assert rel_err(latent(ours), latent(graph)) <= 1e-6
    assert rel_err(latent(graph), engine(graph)) <= 1e-4


@pytest.mark.parametrize("scheduler", ["simple", "published"])
def test_flux_sampling_names_the_shift_by_its_logarithm(latent, written: Path, scheduler: str):
    plain = by_comfyuis_nodes(scheduler=scheduler)
    size = {"width": SIZES[0][0], "height": SIZES[0][1]}
    mu = math.log(2.5)
    flux = with_model_node(plain, "patch", "ModelSamplingFlux", max_shift=mu, base_shift=mu, **size)
    sd3 = with_model_node(plain, "patch", "ModelSamplingSD3", shift=2.5)

    assert rel_err(latent(flux), latent(sd3)) <= 1e-5


def test_custom_sampling_takes_the_shift_of_a_connected_latent(latent, engine):
    graph = with_model_node(by_comfyuis_nodes(SIZES[1]), "patch", "NativeDiTModelSampling", shift=0.0)
    graph["patch"]["inputs"]["latent"] = ["latent", 0]
    links = {key: graph["sampler"]["inputs"][key] for key in ("positive", "negative")}
    graph |= {
        "guider": node("CFGGuider", model=["patch", 0], cfg=3.5, **links),
        "sigmas": node("BasicScheduler", model=["patch", 0], scheduler="published", steps=4, denoise=1.0),
        "euler": node("KSamplerSelect", sampler_name="euler"),
        "noise": node("RandomNoise", noise_seed=7),
        "sampler": node(
            "SamplerCustomAdvanced",
            noise=["noise", 0],
            guider=["guider", 0],
            sampler=["euler", 0],
            sigmas=["sigmas", 0],
            latent_image=["latent", 0],
        ),
    }

    assert rel_err(latent(graph), latent(cogview4.graph(size=SIZES[1]))) <= 1e-6


def test_sizes_and_crop_set_by_a_node_are_the_engines(latent, engine):
    graph = cogview4.graph()
    sizes = {"original_width": 512, "original_height": 640, "target_width": 256, "target_height": 384}
    for prompt in ("positive", "negative"):
        graph[f"{prompt}_sizes"] = node(
            "NativeDiTSizeConditions", conditioning=[prompt, 0], crop_left=8, crop_top=16, **sizes
        )
        graph["sampler"]["inputs"][prompt] = [f"{prompt}_sizes", 0]

    made = latent(graph)

    assert rel_err(made, latent(cogview4.graph())) > 1e-3
    assert rel_err(made, engine(graph)) <= 1e-4


def test_prompts_of_different_length_are_not_padded_against_each_other(latent, engine):
    long = "small green square on the background and a red circle above the blue background and the square"
    graph = cogview4.graph(negative=long)

    assert rel_err(latent(graph), engine(graph)) <= 1e-4


@pytest.mark.parametrize("spelling", sorted(files.DIT_SPELLINGS))
def test_a_lora_of_every_spelling_changes_the_latent_the_same(server: Server, latent, written: Path, spelling: str):
    for name in (spelling, "comfy"):
        tensors = files.lora(cogview4.dit_state(), files.DIT_SPELLINGS[name])
        files.save_file(tensors, server.models("loras") / f"cogview4_{name}.safetensors")

    def with_lora(name: str) -> torch.Tensor:
        patch = {"lora_name": f"cogview4_{name}.safetensors", "strength_model": 1.0}
        return latent(with_model_node(cogview4.graph(), "lora", "LoraLoaderModelOnly", **patch))

    assert rel_err(with_lora(spelling), latent(cogview4.graph())) > 1e-2
    assert rel_err(with_lora(spelling), with_lora("comfy")) <= 1e-6


@pytest.mark.parametrize("precision", ["as stored", "float8_e4m3fn"])
def test_saved_files_load_again_with_the_same_latent(server: Server, latent, written: Path, precision: str):
    save = {
        "model": cogview4.graph()["model"],
        "file": node(
            "NativeDiTSaveDiffusionModel",
            model=["model", 0],
            filename_prefix="diffusion_models/cogview4",
            precision=precision,
            policy="card",
        ),
    }
    shown = server.run(save)["file"]["files"][0]
    name = f"saved_{precision.split()[0]}.safetensors"
    shutil.move(server.file_of(shown), server.models("diffusion_models") / name)
    again = cogview4.graph()
    again["model"]["inputs"]["file"] = name
    loaded = by_comfyuis_nodes()
    loaded["model"]["inputs"]["unet_name"] = name

    made = latent(again)

    assert rel_err(latent(loaded), made) <= 1e-6
    error = rel_err(made, latent(cogview4.graph()))
    assert error <= 1e-6 if precision == "as stored" else 1e-4 < error < 0.2
