"""Six merges in a row take no more memory than one: the numbers are of inside_merges.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import comfyui_files as files
import pytest
import torch
from comfyui_server import environment, make_base, python_for
from safetensors.torch import save_file

pytest.importorskip("diffusers")
pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

SCRIPT = Path(__file__).parent / "inside_merges.py"
WIDE = {**files.DIT, "hidden_size": 768, "num_heads": 12, "depth": 3}


@pytest.fixture(scope="session")
def megabytes(comfyui: Path, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("merges")
    base = make_base(folder / "base")
    (base / "inputs").mkdir()
    for number in range(7):
        state = files.dit_state(WIDE, seed=number + 1, dtype=torch.bfloat16)
        save_file(state, base / "models" / "diffusion_models" / f"merge_{number}.safetensors")
    output = folder / "results.json"
    command = [os.fspath(python_for(comfyui, comfyui_path)), os.fspath(SCRIPT), comfyui, base, output]
    run = subprocess.run(command, cwd=comfyui, env=environment(), capture_output=True, text=True, timeout=600)
    assert output.exists(), run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize("work", ["saved", "quantized", "quantized_each_time"])
def test_b03_memory_does_not_grow_with_the_number_of_merges(megabytes: dict[str, float], work: str):
    """If a model was kept for each merge, six would take ten sources more: ComfyUI holds them in float32 here."""
    one, six, source = (megabytes[name] for name in (f"{work} 1", f"{work} 6", "of a source"))
    assert six < one + 4 * source, megabytes


def test_b03_saving_six_merges_holds_no_copy_for_each_of_them(megabytes: dict[str, float]):
    """Pieces on their way take some 100 MB, whatever the model; seven models would be 460 MB, in float32 twice that."""
    assert megabytes["saved 6"] < 250, megabytes
