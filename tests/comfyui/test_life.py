"""The checks of inside_life.py, each as a test: what people do with a model, for architectures of ours."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import cogview4_files as cogview4
import f_lite_files as f_lite
import pytest
import sana_files as sana
import torch
from comfyui_server import environment, make_base, python_for
from safetensors.torch import save_file

pytestmark = pytest.mark.comfyui

SCRIPT = Path(__file__).parent / "inside_life.py"
# Files, how to write them, and channels of the latent.
ROWS = {
    "cogview4": (cogview4, lambda models: cogview4.write(models, cogview4.WIDE_DIT, cogview4.WIDE_GLM), 16),
    "f_lite": (f_lite, lambda models: f_lite.write(models, f_lite.WIDE_DIT, f_lite.WIDE_T5), 16),
    "sana": (sana, sana.write_wide, 32),
}

CHECKS = [
    node.name
    for node in ast.parse(SCRIPT.with_name("life_checks.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


def write(base: Path, row: str) -> None:
    """The tiny files of a row under its name, and inputs for its transformer."""
    module, write_files, channels = ROWS[row]
    write_files(base / "models")
    for folder in ("diffusion_models", "text_encoders"):
        (base / "models" / folder / module.NAMES[folder]).rename(base / "models" / folder / f"{row}.safetensors")
    generator = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(1, channels, 8, 12, generator=generator),
        "timesteps": torch.tensor([0.4 if row == "f_lite" else 400.0]),
        "context": torch.randn(1, 16, 256, generator=generator),
    }
    save_file(given, base / "inputs" / f"{row}.safetensors")


@pytest.fixture(scope="session")
def results(comfyui: Path, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = make_base(tmp_path_factory.mktemp("life") / "base")
    (base / "inputs").mkdir()
    for row in ROWS:
        write(base, row)
    output = base / "results.json"
    command = [os.fspath(python_for(comfyui, comfyui_path)), os.fspath(SCRIPT), comfyui, base, output]
    run = subprocess.run(command, cwd=comfyui, env=environment(), capture_output=True, text=True, timeout=600)
    assert output.exists(), run.stdout[-2000:] + run.stderr[-4000:]
    found = json.loads(output.read_text())
    print(json.dumps(found["values"], indent=1))
    return found["checks"]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("check", CHECKS)
def test_life_of(results: dict[str, Any], check: str, row: str):
    assert results[f"{check}[{row}]"] == "", results[f"{check}[{row}]"]
