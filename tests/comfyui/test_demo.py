"""The demo workflow that users see first: in ComfyUI, and the same in the engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import comfyui_files as files
import numpy as np
import pytest
import torch
from comfyui_graphs import node
from comfyui_server import Server
from PIL import Image
from support import rel_err

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="session")
def workflow(root: Path) -> dict:
    """In API format, with the latent saved too."""
    graph = json.loads((root / "example_workflows" / "api" / "nativedit_demo.json").read_text(encoding="utf-8"))
    [sampler] = [key for key, value in graph.items() if value["class_type"] == "KSampler"]
    return {**graph, "latent": node("SaveLatent", samples=[sampler, 0], filename_prefix="latents/demo")}


@pytest.fixture(scope="session")
def pictures(root: Path) -> ModuleType:
    """The script that draws the training pictures and checks a picture against its prompt."""
    spec = importlib.util.spec_from_file_location("demo_pictures", root / "scripts" / "demo_pictures.py")
    module = sys.modules["demo_pictures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Demo:
    latent: torch.Tensor
    picture: Path


@pytest.fixture(scope="session")
def in_comfyui(server: Server, workflow: dict) -> Demo:
    outputs = server.run(workflow)
    [picture] = [output["images"][0] for output in outputs.values() if "images" in output]
    latent = files.tensors(server.file_of(outputs["latent"]["latents"][0]))["latent_tensor"]
    return Demo(latent, server.file_of(picture))


def pixels(file: Path) -> np.ndarray:
    with Image.open(file) as picture:
        return np.asarray(picture.convert("RGB"))


def test_the_demo_shows_what_its_prompt_says(in_comfyui: Demo, workflow: dict, pictures: ModuleType):
    [prompt] = [node["inputs"]["text"] for node in workflow.values() if node["inputs"].get("text")]

    assert pictures.check(pixels(in_comfyui.picture), prompt) == []


def test_the_engine_makes_the_same_demo_picture(in_comfyui: Demo, workflow: dict, tmp_path: Path):
    import nativedit

    result = nativedit.run(workflow, models_dir=tmp_path, output_dir=tmp_path / "output", progress=False)

    [sampler] = [key for key, value in workflow.items() if value["class_type"] == "KSampler"]
    assert rel_err(result.outputs[sampler][0]["samples"], in_comfyui.latent) <= 1e-4
    difference = pixels(result.pictures[0]).astype(int) - pixels(in_comfyui.picture)
    assert np.abs(difference).max() <= 1


def test_cores_text_encoder_loader_gives_the_same_demo_picture(server: Server, in_comfyui: Demo, workflow: dict):
    graph = json.loads(json.dumps(workflow))
    [loader] = [key for key, value in graph.items() if value["class_type"] == "NativeDiTLoadTextEncoder"]
    graph[loader] = node("CLIPLoader", clip_name=graph[loader]["inputs"]["file"], type="stable_diffusion")

    latent = files.tensors(server.file_of(server.run(graph)["latent"]["latents"][0]))["latent_tensor"]

    assert rel_err(latent, in_comfyui.latent) <= 1e-6
