"""Calibrating in a graph on a running ComfyUI, and calibrated files in its own loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_graphs import node, text_to_latent
from comfyui_server import Server, at_least
from safetensors.torch import load_file
from support import rel_err

import nativedit
from nativedit.engine.calibrate import calibrate
from nativedit.quant.calibration import read_calibration
from nativedit.quant.craft import Craft
from nativedit.quant.rounding import Rounding

pytestmark = pytest.mark.comfyui

MODEL = "tiny_bf16.safetensors"
CONDITIONS = {"positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0], "seed": 3}


def _nodes() -> dict[str, Any]:
    graph = text_to_latent(model=MODEL, cfg=1.0, loader="NativeDiTLoadDiffusionModel")
    graph["clip"]["inputs"]["architecture"] = "prx_pixel"
    return graph


@pytest.fixture
def statistics(server: Server) -> Path:
    graph = _nodes()
    del graph["sampler"], graph["save"]
    settings = {**CONDITIONS, "steps": 2, "cfg": 1.0, "filename_prefix": "calibration/tiny"}
    graph["watch"] = node("NativeDiTCalibrateModel", model=["model", 0], **settings)
    [file] = server.run(graph)["watch"]["files"]
    return server.file_of(file)


def test_the_statistics_are_those_of_the_engine(server: Server, statistics: Path, tmp_path: Path):
    graph = _nodes()
    graph["sampler"] = node("NativeDiTSample", model=["model", 0], **CONDITIONS, steps=2, cfg=1.0)
    graph["sampler"]["inputs"] |= {"sampler_name": "auto", "scheduler": "auto", "shift": 0.0, "denoise": 1.0}
    models = server.models("diffusion_models").parent
    expected = calibrate(graph, tmp_path / "stats.safetensors", models_dir=models, progress=False)
    found = read_calibration(statistics)
    assert found.layers.keys() == expected.layers.keys()
    for name, inputs in found.layers.items():
        assert rel_err(inputs.power, expected.layers[name].power) < 0.05, name


@pytest.mark.parametrize("format", ["float8_e4m3fn", "nvfp4"])
def test_core_loads_calibrated_layers_and_gives_the_plain_models_latent(
    server: Server, latent: Callable[..., torch.Tensor], statistics: Path, format: str
):
    smooth = format == "nvfp4" and at_least(server.comfyui, "0.30.0")
    craft = Craft(calibration=read_calibration(statistics), smooth=smooth, rounding=Rounding())
    folder = server.models("diffusion_models")
    target = folder / f"calibrated_{format}.safetensors"
    nativedit.quantize(folder / MODEL, target, format=format, craft=craft)
    suffixes = {key.rsplit(".", 1)[-1] for key in load_file(target)}
    assert "input_scale" in suffixes and ("pre_quant_scale" in suffixes) == smooth
    graph = _nodes()
    quantized = latent({**graph, "model": node("UNETLoader", unet_name=target.name, weight_dtype="default")})
    plain = latent(graph)
    assert 1e-4 < rel_err(quantized, plain) < (0.25 if format == "nvfp4" else 0.1)


@pytest.mark.parametrize("format", ["float8_e4m3fn", "nvfp4"])
def test_a_graph_calibrates_quantizes_and_saves_and_core_samples_the_file(
    server: Server, latent: Callable[..., torch.Tensor], format: str
):
    graph = _nodes()
    plain = latent(graph)
    settings = {**CONDITIONS, "steps": 2, "cfg": 1.0, "filename_prefix": f"calibration/in_graph_{format}"}
    made = {key: value for key, value in graph.items() if key not in ("sampler", "save")}
    made["watch"] = node("NativeDiTCalibrateModel", model=["model", 0], **settings)
    smooth = format == "nvfp4" and at_least(server.comfyui, "0.30.0")
    craft = {"calibration": ["watch", 1], "rounding": "feedback", "smooth": smooth}
    rules = {"format": format, "policy": "card", "keep": ""}
    made["quantize"] = node("NativeDiTQuantizeModel", model=["model", 0], **rules, **craft)
    saving = {"filename_prefix": "quant/calibrated", "precision": "as stored", "policy": "card"}
    made["save"] = node("NativeDiTSaveDiffusionModel", model=["quantize", 0], **saving)
    outputs = server.run(made)
    saved, [statistics] = server.file_of(outputs["save"]["files"][0]), outputs["watch"]["files"]
    name = f"{statistics['subfolder']}/{statistics['filename']}"

    # what the command makes of the same file with the same statistics; on a CPU the graph holds it in float32
    folder = server.models("diffusion_models")
    wanted = folder / f"wanted_{format}.safetensors"
    command = Craft("float32", read_calibration(server.file_of(statistics)), smooth, Rounding())
    nativedit.quantize(folder / MODEL, wanted, format=format, craft=command)
    _same(saved, wanted)
    suffixes = {key.rpartition(".")[2] for key in load_file(saved)}
    assert "input_scale" in suffixes and ("pre_quant_scale" in suffixes) == smooth

    # chosen from the list: while loading, and while saving
    info = server.get_json("/object_info/NativeDiTLoadDiffusionModel")["NativeDiTLoadDiffusionModel"]
    assert name in info["input"]["optional"]["calibration"][1]["options"]
    chosen = {**craft, "calibration": name}
    saving = {**saving, "precision": format, "filename_prefix": "quant/calibrated_on_save"}
    on_save = {"model": graph["model"], "save": node("NativeDiTSaveDiffusionModel", model=["model", 0], **saving)}
    on_save["save"]["inputs"] |= chosen
    _same(server.file_of(server.run(on_save)["save"]["files"][0]), wanted)
    on_load = {"model": node("NativeDiTLoadDiffusionModel", **graph["model"]["inputs"] | chosen)}
    on_load["model"]["inputs"]["precision"] = format
    on_load["save"] = node("NativeDiTSaveDiffusionModel", **saving | {"precision": "as stored"}, model=["model", 0])
    exact = folder / f"exact_{format}.safetensors"
    nativedit.quantize(folder / MODEL, exact, format=format, craft=replace(command, compute="stored"))
    _same(server.file_of(server.run(on_load)["save"]["files"][0]), exact)

    again = latent({**graph, "model": node("UNETLoader", unet_name=wanted.name, weight_dtype="default")})
    assert 1e-4 < rel_err(again, plain) < (0.25 if format == "nvfp4" else 0.1)


def _same(file: Path, wanted: Path) -> None:
    """Value by value: ComfyUI's models hold norms in float32."""
    found, expected = load_file(file), load_file(wanted)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value.float(), expected[key].float()), key
