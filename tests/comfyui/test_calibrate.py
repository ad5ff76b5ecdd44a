"""Calibrating in a graph on a running ComfyUI, and calibrated files in its own loader."""

from __future__ import annotations

from collections.abc import Callable
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
