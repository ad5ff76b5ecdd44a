"""The checks of inside_quant.py, each as a test: ComfyUI's own architectures quantized, patched, saved and reloaded."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import comfyui_files as files
import core_models
import key_layouts
import pytest
import torch
from comfyui_server import environment, make_base, python_for
from quant_rows import wanted
from safetensors.torch import save_file

pytest.importorskip("diffusers")
pytestmark = pytest.mark.comfyui

SCRIPT = Path(__file__).parent / "inside_quant.py"
FUNCTIONS = [
    node.name
    for name in ("quant_files_checks.py", "quant_patch_checks.py")
    for node in ast.parse(SCRIPT.with_name(name).read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]
ROWS = [*core_models.ROWS, "prx_pixel"]
CHECKS = [name for name in FUNCTIONS if name.startswith("check_once_")]
CHECKS += [f"{name}[{row}]" for name in FUNCTIONS for row in ROWS if wanted(name, row)]


def write_prx(base: Path) -> None:
    """Ours among core's. Wide enough for a rotation's group of 256."""
    state = files.dit_state({**files.DIT, "hidden_size": 256, "num_heads": 8}, dtype=torch.bfloat16)
    save_file(state, base / "models" / "diffusion_models" / "prx_pixel.safetensors")
    generator = torch.Generator().manual_seed(0)
    given = {"x": torch.randn(1, 3, 32, 32, generator=generator), "timesteps": torch.tensor([0.4])}
    given["context"] = torch.randn(1, 5, 32, generator=generator)
    save_file(given, base / "inputs" / "prx_pixel.safetensors")


@pytest.fixture(scope="session")
def results(comfyui: Path, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inside_quant")
    base = make_base(folder / "base")
    core_models.write(folder / "source", base)
    write_prx(base)
    layouts = {name: key_layouts._layout(name) for name in key_layouts.names() if name.endswith(".comfy")}
    (base / "layouts.json").write_text(json.dumps(layouts))
    output = folder / "results.json"
    command = [os.fspath(python_for(comfyui, comfyui_path)), os.fspath(SCRIPT), comfyui, base, output]
    run = subprocess.run(command, cwd=comfyui, env=environment(), capture_output=True, text=True, timeout=900)
    assert output.exists(), run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(output.read_text())["checks"]


@pytest.mark.parametrize("check", CHECKS)
def test_inside_comfyui(results: dict[str, Any], check: str):
    assert results[check] == "", results[check]
