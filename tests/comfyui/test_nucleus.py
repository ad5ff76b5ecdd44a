"""The checks of inside_nucleus.py, each as a test: Nucleus-Image in a real ComfyUI beside our modules outside of it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_files import random_state
from comfyui_server import environment, make_base, python_for
from safetensors.torch import save_file

import nativedit
from nativedit.checkpoints.load import load_diffusion_model
from nativedit.latent_formats import get_latent_format
from nativedit.ldm.nucleus.model import NucleusMoEImageTransformer2DModel
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
# Head, strategy and capacities as published, so that shapes and card tell all of it.
TINY = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 5,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "joint_attention_dim": 32,
    "axes_dims_rope": (16, 56, 56),
    "dense_moe_strategy": "leave_first_three_blocks_dense",
    "num_experts": 8,
    "moe_intermediate_dim": 64,
    "capacity_factors": [0.0, 0.0, 0.0, 4.0, 4.0],
}


def published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Banks as the publisher stores them."""
    result = {}
    for key, value in state.items():
        bank = ".experts." in key
        result[key.removesuffix(".weight") if bank else key] = value.transpose(1, 2).contiguous() if bank else value
    return result


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
    state = random_state(NucleusMoEImageTransformer2DModel(**TINY, device="meta"), 5)
    folder = base / "models" / "diffusion_models"
    save_file(state, folder / "ours.safetensors")
    save_file(published(state), folder / "published.safetensors")
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
