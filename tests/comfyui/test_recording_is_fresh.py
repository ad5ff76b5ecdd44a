"""The recordings that CI relies on still say what this ComfyUI does."""

from __future__ import annotations

import pytest
from comfyui_recording import record, recording_file
from comfyui_server import Server, version_of

pytestmark = pytest.mark.comfyui


def test_the_recording_of_this_version_is_fresh(server: Server):
    file = recording_file(version_of(server.comfyui))
    if not file.exists():
        pytest.skip(f"ComfyUI {version_of(server.comfyui)} is not recorded; scripts/record_comfyui.py does it")
    from comfyui_recording import recordings

    recorded, now = recordings()[version_of(server.comfyui)], record(server)

    advice = "run scripts/record_comfyui.py"
    assert recorded["signatures"] == now["signatures"], advice
    assert recorded["nodes"] == now["nodes"], advice
