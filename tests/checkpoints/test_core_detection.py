"""Core's models stay core's: its detection says the same of every key set with the pack as without it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import key_layouts
import pytest
from comfyui_server import at_least

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory, comfyui_path, comfyui_interpreter, root) -> dict:
    folder = tmp_path_factory.mktemp("detection")
    layouts = {name: key_layouts.layout(name) for name in key_layouts.names()}
    (folder / "layouts.json").write_text(json.dumps(layouts))
    script = Path(__file__).with_name("comfyui_detection.py")
    run = subprocess.run(
        [str(comfyui_interpreter), str(script), str(root), str(folder / "layouts.json"), str(folder / "out.json")],
        cwd=comfyui_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


def test_every_verdict_is_the_same_with_the_pack(verdicts):
    changed = {name: (verdicts["before"][name], verdicts["after"][name]) for name in verdicts["before"]
               if verdicts["before"][name] != verdicts["after"][name]}  # fmt: skip
    assert changed == {}


def test_no_card_without_a_module_is_registered(verdicts):
    from nativedit.supported_models import architectures

    names = {f"NativeDiT_{card.name}" for card in architectures() if card.module}
    assert verdicts["added"] and set(verdicts["added"]) <= names


def test_comfyui_knows_every_carded_model_by_itself(verdicts, comfyui_path):
    """The comfy layout of each is recognised, in the spelling that is written."""
    if not at_least(comfyui_path, "0.29"):
        pytest.skip("some of the carded models are younger than this ComfyUI")
    for row in key_layouts.CARDS:
        for name in (f"{row}.comfy", f"{row}.comfy_scale"):
            if name in verdicts["before"]:
                assert verdicts["before"][name][0].split()[0] not in ("nothing", "raises"), name
