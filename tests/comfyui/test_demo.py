"""The demo workflow that users see first: in ComfyUI, and the same in the engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import comfyui_files as files
import numpy as np
import pytest
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


def test_the_demo_shows_what_its_prompt_says_and_the_engine_the_same(
    server: Server, workflow: dict, pictures: ModuleType, tmp_path: Path
):
    import nativedit

    outputs = server.run(workflow)
    [saved] = [output["images"][0] for output in outputs.values() if "images" in output]
    there = files.tensors(server.file_of(outputs["latent"]["latents"][0]))["latent_tensor"]
    result = nativedit.run(workflow, models_dir=tmp_path, output_dir=tmp_path / "output", progress=False)

    with Image.open(server.file_of(saved)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    [prompt] = [v["inputs"]["text"] for v in workflow.values() if v["inputs"].get("text")]
    assert pictures.check(pixels, prompt) == []
    [sampler] = [key for key, value in workflow.items() if value["class_type"] == "KSampler"]
    assert rel_err(result.outputs[sampler][0]["samples"], there) <= 1e-4
    with Image.open(result.pictures[0]) as picture:
        here = np.asarray(picture.convert("RGB")).astype(int)
    assert np.abs(here - pixels).max() <= 1


def test_core_s_text_encoder_loader_gives_the_same_demo_picture(server: Server, workflow: dict):
    graph = json.loads(json.dumps(workflow))
    [loader] = [key for key, value in graph.items() if value["class_type"] == "NativeDiTLoadTextEncoder"]
    graph[loader] = node("CLIPLoader", clip_name=graph[loader]["inputs"]["file"], type="stable_diffusion")

    first, second = (
        files.tensors(server.file_of(server.run(g)["latent"]["latents"][0]))["latent_tensor"] for g in (workflow, graph)
    )

    assert rel_err(second, first) <= 1e-6
