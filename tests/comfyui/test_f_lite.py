"""F-Lite in ComfyUI's graph: the engine's numbers, with both kinds of guidance, through our nodes and ComfyUI's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfyui_files as files
import f_lite_files as f_lite
import pytest
import torch
from comfyui_graphs import Graph, node, with_model_node
from comfyui_server import Server
from support import rel_err

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="session")
def written(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny files, in ComfyUI's models folder and in one for the engine."""
    own = tmp_path_factory.mktemp("f_lite")
    for models in (server.base / "models", own):
        f_lite.write(models)
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": (64, 128), "negative": "small green square"},
        {"projected": True},
        {"sampler": {"scheduler": "beta"}},
    ],
    ids=str,
)
def test_the_latent_is_the_engines(latent, engine, options: dict[str, Any]):
    graph = f_lite.graph(**options)

    made = latent(graph)

    assert made.std() > 0.1
    assert rel_err(made, engine(graph)) <= 1e-4


def test_the_example_workflows_latent_is_the_engines(latent, engine):
    assert rel_err(latent(f_lite.example()), engine(f_lite.example())) <= 1e-4


def test_ksampler_with_the_published_schedule_gives_the_same_latent(latent, written: Path):
    graph = f_lite.graph(size=(64, 128))
    links = {key: graph["sampler"]["inputs"][key] for key in ("model", "positive", "negative", "latent_image")}
    settings = {"steps": 4, "cfg": 6.0, "sampler_name": "euler", "scheduler": "published", "denoise": 1.0, "seed": 7}
    expected = latent(graph)
    graph["sampler"] = node("KSampler", **links, **settings)

    assert rel_err(latent(graph), expected) <= 1e-6


@pytest.mark.parametrize("spelling", sorted(files.DIT_SPELLINGS))
def test_a_lora_of_every_spelling_changes_the_latent_the_same(server: Server, latent, written: Path, spelling: str):
    for name in (spelling, "comfy"):
        tensors = files.lora(f_lite.dit_state(), files.DIT_SPELLINGS[name])
        files.save_file(tensors, server.models("loras") / f"f_lite_{name}.safetensors")

    def with_lora(name: str) -> torch.Tensor:
        patch = {"lora_name": f"f_lite_{name}.safetensors", "strength_model": 1.0}
        return latent(with_model_node(f_lite.graph(), "lora", "LoraLoaderModelOnly", **patch))

    assert rel_err(with_lora(spelling), latent(f_lite.graph())) > 1e-2
    assert rel_err(with_lora(spelling), with_lora("comfy")) <= 1e-6


@pytest.mark.parametrize("precision", ["as stored", "float8_e4m3fn"])
def test_saved_files_load_again_with_the_same_latent(server: Server, latent, written: Path, precision: str):
    save = {
        "model": f_lite.graph()["model"],
        "file": node(
            "NativeDiTSaveDiffusionModel",
            model=["model", 0],
            filename_prefix="diffusion_models/f_lite",
            precision=precision,
            policy="card",
        ),
    }
    shown = server.run(save)["file"]["files"][0]
    name = f"saved_f_lite_{precision.split()[0]}.safetensors"
    shutil.move(server.file_of(shown), server.models("diffusion_models") / name)
    again = f_lite.graph()
    again["model"]["inputs"]["unet_name"] = name

    error = rel_err(latent(again), latent(f_lite.graph()))

    assert error <= 1e-6 if precision == "as stored" else 1e-4 < error < 0.3


def test_a_saved_text_encoder_keeps_its_tokenizer(server: Server, latent, written: Path):
    save = {
        "clip": f_lite.graph()["clip"],
        "file": node(
            "NativeDiTSaveTextEncoder",
            clip=["clip", 0],
            filename_prefix="text_encoders/t5",
            precision="as stored",
            policy="card",
        ),
    }
    shown = server.run(save)["file"]["files"][0]
    shutil.move(server.file_of(shown), server.models("text_encoders") / "saved_t5.safetensors")
    again = f_lite.graph()
    again["clip"]["inputs"]["file"] = "saved_t5.safetensors"

    assert rel_err(latent(again), latent(f_lite.graph())) <= 1e-6
