"""The checks of inside.py and inside_models.py, each as a test: how the pack gets along with ComfyUI, other packs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import comfyui_files as files
import pytest
from comfyui_server import WAIT_SECONDS, environment, install_pack, make_base, python_for

pytestmark = pytest.mark.comfyui

SCRIPT = Path(__file__).parent / "inside.py"
CHECKS = [
    node.name
    for file in (SCRIPT, SCRIPT.with_name("inside_models.py"))
    for node in ast.parse(file.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="session")
def results(comfyui: Path, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inside")
    base = make_base(folder / "base")
    install_pack(base, "second_copy")
    install_pack(base / "site", "nativedit")
    files.write_models(base / "models")
    files.write_loras(base / "models" / "loras")
    output = folder / "results.json"
    command = [os.fspath(python_for(comfyui, comfyui_path)), os.fspath(SCRIPT), comfyui, base, output]
    run = subprocess.run(command, cwd=comfyui, env=environment(), capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert output.exists(), run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_inside_comfyui(results: dict[str, Any], check: str):
    assert results[check] == "", results[check]
