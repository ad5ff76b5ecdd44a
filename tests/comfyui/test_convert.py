"""NativeDiTConvertCheckpoint on a running ComfyUI: contained, cancellable, its errors on the node."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from comfyui_graphs import node
from comfyui_server import GraphError, Server, at_least
from hollow import write_hollow
from key_layouts import layout
from safetensors.torch import load_file, save_file
from tiny_models import tiny_module, write_folder

from nativedit.checkpoints.convert import convert

pytest.importorskip("diffusers")
pytestmark = pytest.mark.comfyui

SOURCE = "diffusers/Klein"


@pytest.fixture(scope="module")
def source(server: Server) -> Path:
    """A diffusers folder among the models, in two shards."""
    return write_folder(server.models("diffusers") / "Klein", tiny_module("flux_schnell"), shards=2)


def graph(**inputs) -> dict:
    defaults = {"source": SOURCE, "filename_prefix": "diffusion_models/c", "layout": "comfy", "component": "auto"}
    return {"convert": node("NativeDiTConvertCheckpoint", **{**defaults, "architecture": "auto", **inputs})}


def run(server: Server, **inputs) -> dict:
    return server.run(graph(**inputs))["convert"]


def test_a_folder_becomes_a_file_that_comfyui_lists_and_loads(server: Server, source: Path, tmp_path: Path):
    shown = run(server)

    [file] = shown["files"]
    convert(source, tmp_path / "wanted.safetensors")
    assert server.file_of(file).read_bytes() == (tmp_path / "wanted.safetensors").read_bytes()
    assert "FLUX.1 in comfy layout" in shown["text"][0]
    listed = server.get_json("/object_info/UNETLoader")["UNETLoader"]["input"]["required"]["unet_name"]
    assert file["filename"] in json.dumps(listed)
    if not at_least(server.comfyui, "0.29"):
        return  # it builds every FLUX with 24 heads, which this one is too narrow for
    loaded = {"model": node("UNETLoader", unet_name=file["filename"], weight_dtype="default")}
    server.run({**loaded, "end": node("ModelSave", model=["model", 0], filename_prefix="loaded")})


def test_a_file_becomes_a_diffusers_folder(server: Server, source: Path, tmp_path: Path):
    convert(source, server.models("diffusion_models") / "klein.safetensors")

    [file] = run(server, source="diffusion_models/klein.safetensors", layout="diffusers", filename_prefix="d")["files"]

    folder = server.file_of(file).parent
    convert(folder, tmp_path / "again.safetensors")
    first, second = (
        load_file(tmp_path / "again.safetensors"),
        load_file(server.models("diffusion_models") / "klein.safetensors"),
    )
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert folder.parent == server.base / "output"


@pytest.mark.parametrize("layout_name", ["comfy", "diffusers"])
@pytest.mark.parametrize("prefix", ["../x", "/tmp/x", "C:\\x", "..\\x", "nul", "a\0b", "link/x"])
def test_nothing_is_written_outside_the_output_folder(server: Server, source: Path, prefix: str, layout_name: str):
    elsewhere = server.base / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    if not (server.base / "output/link").is_symlink():
        os.symlink(elsewhere, server.base / "output/link")

    with pytest.raises(GraphError) as raised:
        run(server, filename_prefix=prefix, layout=layout_name)

    assert raised.value.node == "convert"
    assert os.listdir(elsewhere) == [] and not (server.base / "x_00001_.safetensors").exists()


@pytest.mark.parametrize("name", ["diffusers/../../secret", "/etc/passwd", "diffusers/Klein/../../../x"])
def test_only_what_is_listed_can_be_read(server: Server, source: Path, name: str):
    with pytest.raises(GraphError, match="not in list"):
        run(server, source=name)


def test_what_is_wrong_is_said_on_the_node(server: Server, source: Path):
    with pytest.raises(GraphError, match="is a LoRA or another adapter") as raised:
        run(server, source="diffusion_models/a_lora.safetensors")
    assert raised.value.node == "convert"
    state = {key: value for file in source.glob("*.safetensors") for key, value in load_file(file).items()}
    lost = state.pop("single_transformer_blocks.1.attn.to_k.weight")
    save_file({"what": lost, **state}, server.models("diffusion_models") / "a_key_too_many.safetensors")
    with pytest.raises(
        GraphError, match=r"1 weights of FLUX\.1 are missing: .*to_k\.weight; 1 keys are none of its: what"
    ):
        run(server, source="diffusion_models/a_key_too_many.safetensors")


def test_cancelling_leaves_nothing(server: Server, source: Path):
    """A model of full size, which takes seconds; its source is a file of holes."""
    write_hollow(server.models("diffusion_models") / "wan.safetensors", layout("wan21_t2v_1_3b.diffusers"))
    folder = server.base / "output/cancelled"
    problem: list[Exception] = []

    def convert_it() -> None:
        try:
            run(server, source="diffusion_models/wan.safetensors", filename_prefix="cancelled/wan")
        except GraphError as error:
            problem.append(error)

    running = threading.Thread(target=convert_it)
    running.start()
    deadline = time.monotonic() + 60
    while running.is_alive() and time.monotonic() < deadline:
        if folder.is_dir():  # made right before the writing begins
            interrupt = urllib.request.Request(server.url + "/interrupt", b"{}", {"Content-Type": "application/json"})
            urllib.request.urlopen(interrupt, timeout=60).read()
        time.sleep(0.02)

    assert "execution_interrupted" in str(problem)
    assert os.listdir(folder) == []
    (server.models("diffusion_models") / "wan.safetensors").unlink()
