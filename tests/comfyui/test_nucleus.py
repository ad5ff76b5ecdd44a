"""The checks of inside_nucleus.py, each as a test: Nucleus-Image in a real ComfyUI beside our modules outside of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nucleus_files as nucleus
import numpy as np
import pytest
import torch
from comfyui_server import Server, environment, make_base, python_for
from PIL import Image
from safetensors.torch import save_file
from support import rel_err

import nativedit
from nativedit.checkpoints.load import load_diffusion_model
from nativedit.latent_formats import get_latent_format
from nativedit.ldm.nucleus.sampling import patch_renormalized_guidance
from nativedit.quant.formats import OFFERED
from nativedit.quant.ops import ComfyUIOps

pytestmark = pytest.mark.comfyui

SCRIPT = Path(__file__).parent / "inside_nucleus.py"
CHECKS = [
    node.name
    for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]
FORMATS = OFFERED


def euler(module: torch.nn.Module, given: dict[str, torch.Tensor], noise: torch.Tensor, steps: int, cfg: float):
    """The publisher's loop: times from 1 to 1 / steps, both prompts apart, the sign turned."""
    x = noise
    for i in range(steps):
        time, following = 1 - i / steps, 1 - (i + 1) / steps
        cond, uncond = (
            module(x, torch.tensor([time]), context) for context in (given["context"][:1], given["context"][1:, :3])
        )
        x = x + (following - time) * -patch_renormalized_guidance(cond, uncond, cfg)
    return x


def write_models(base: Path) -> None:
    torch.manual_seed(0)
    state = nucleus.dit_state()
    folder = base / "models" / "diffusion_models"
    save_file(state, folder / "ours.safetensors")
    save_file(nucleus.published(state), folder / "published.safetensors")
    given = {
        "x": torch.randn(2, 16, 1, 8, 12),
        "timesteps": torch.tensor([0.75, 0.2]),
        "context": torch.randn(2, 6, 32),
        "mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]),
    }
    expected = dict(given)

    def run(module: torch.nn.Module) -> torch.Tensor:
        return module(given["x"], given["timesteps"], given["context"], given["mask"])

    with torch.no_grad():
        plain = nativedit.load_diffusion_model(folder / "published.safetensors")
        expected["plain"] = run(plain)
        noise = torch.randn(1, 16, 1, 8, 12, generator=torch.Generator().manual_seed(3))
        latent = get_latent_format("wan21")
        expected["sampled"] = latent.from_model(euler(plain, given, noise, 4, 4.0))
        for name in FORMATS:
            nativedit.quantize(folder / "ours.safetensors", folder / f"{name}.safetensors", format=name)
            module = load_diffusion_model(
                folder / f"{name}.safetensors", quantized_operations=ComfyUIOps, dtype=torch.float32
            )
            expected[f"output.{name}"] = run(module)
    save_file({key: value.contiguous() for key, value in expected.items()}, base / "expected.safetensors")


@pytest.fixture(scope="session")
def results(comfyui: Path, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("nucleus")
    base = make_base(folder / "base")
    write_models(base)
    output = folder / "results.json"
    command = [os.fspath(python_for(comfyui, comfyui_path)), os.fspath(SCRIPT), comfyui, base, output]
    run = subprocess.run(command, cwd=comfyui, env=environment(), capture_output=True, text=True, timeout=600)
    print(run.stdout[-3000:])
    assert output.exists(), run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_nucleus_image_in_comfyui(results: dict[str, Any], check: str):
    assert results[check] == "", results[check]


@pytest.fixture(scope="session")
def written(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny files, in ComfyUI's models folder and in one for the engine."""
    pytest.importorskip("diffusers")
    own = tmp_path_factory.mktemp("nucleus_models")
    for models in (server.base / "models", own):
        nucleus.write(models)
    return own


@pytest.mark.parametrize("size", [(96, 64), (80, 48)])
def test_the_example_workflow_gives_the_engines_latent_and_picture(
    server: Server, written: Path, latent: Callable, size: tuple[int, int], tmp_path: Path
):
    """The second size has odd counts of tokens."""
    graph = nucleus.example(size)
    result = nativedit.run(graph, models_dir=written, output_dir=tmp_path, progress=False)
    source, output = graph["save"]["inputs"]["samples"]
    expected = result.outputs[source][output]["samples"].squeeze(2)

    assert expected.std() > 0.1
    assert rel_err(latent(graph).squeeze(2), expected) <= 1e-4
    [saved] = [node["images"][0] for node in server.run(graph).values() if "images" in node]
    with Image.open(server.file_of(saved)) as picture, Image.open(result.pictures[0]) as own:
        assert picture.size == own.size == size
        assert np.abs(np.asarray(picture).astype(int) - np.asarray(own).astype(int)).max() <= 2
