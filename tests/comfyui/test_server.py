"""The pack in a real ComfyUI: it starts clean, shows what it has, and its models are ordinary models there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import text_to_latent
from comfyui_server import PACK_FOLDER, Server, at_least, make_base, python_for

pytestmark = pytest.mark.comfyui

NODE_IDS = ("NativeDiTLoadDiffusionModel", "NativeDiTLoadTextEncoder", "NativeDiTEmptyLatent")


def test_the_server_starts_without_a_warning_or_error_of_ours(server: Server):
    ours = [line for line in server.start_log.splitlines() if re.search(r"nativedit", line, re.IGNORECASE)]

    loaded = [line for line in ours if re.search(r"\d seconds", line)]
    assert len(loaded) == 1, "ComfyUI lists the pack once among the custom nodes it has loaded"
    assert "IMPORT FAILED" not in loaded[0]
    # The remaining lines only name the folder it runs in.
    assert [line for line in ours if line not in loaded and str(server.base) not in line] == []


def test_object_info_shows_our_nodes_with_their_help(server: Server):
    info = server.get_json("/object_info")

    for node_id in NODE_IDS:
        assert info[node_id]["category"].startswith("NativeDiT/")
        page = server.get(f"/extensions/{PACK_FOLDER}/docs/{node_id}.md").decode()
        assert page.startswith("#")


def test_the_demo_models_stand_behind_the_users_in_every_loader(server: Server):
    info = server.get_json("/object_info")
    lists = {
        "nativedit_demo_prx_pixel.safetensors": (
            info["UNETLoader"]["input"]["required"]["unet_name"][0],
            _options(info["NativeDiTLoadDiffusionModel"]["input"]["required"]["file"]),
        ),
        "nativedit_demo_qwen3.safetensors": (
            info["CLIPLoader"]["input"]["required"]["clip_name"][0],
            _options(info["NativeDiTLoadTextEncoder"]["input"]["required"]["file"]),
        ),
    }

    for file, options in lists.items():
        assert all(file in names for names in options), file


def test_the_example_workflows_are_templates_with_a_thumbnail(server: Server, root):
    names = sorted(path.stem for path in (root / "example_workflows").glob("*.json"))

    listed = server.get_json("/workflow_templates")[PACK_FOLDER] if names else []
    assert sorted(listed) == names
    for name in names:
        thumbnail = server.get(f"/api/workflow_templates/{PACK_FOLDER}/{name}.jpg")
        assert thumbnail.startswith(b"\xff\xd8\xff")


def test_the_old_memory_manager_gives_the_same_latent(
    server: Server, latent: Callable, comfyui: Path, comfyui_path: Path, tmp_path: Path
):
    if not at_least(comfyui, "0.29"):
        pytest.skip("this ComfyUI has one memory manager and no switch for it")
    expected = latent(text_to_latent(steps=2))
    base = make_base(tmp_path / "base")
    files.write_models(base / "models")

    with Server(comfyui, base, python_for(comfyui, comfyui_path), ("--disable-dynamic-vram",)) as plain:
        outputs = plain.run(text_to_latent(steps=2))
        found = files.tensors(plain.file_of(outputs["save"]["latents"][0]))["latent_tensor"]

    assert torch.equal(found, expected)


def _options(spec) -> list[str]:
    """A combo's entries, in the schema's old and new spelling."""
    return spec[0] if isinstance(spec[0], list) else spec[1]["options"]
