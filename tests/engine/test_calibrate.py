"""Calibrating without ComfyUI: by command and by node, the same statistics of the one model that a graph samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from comfyui_graphs import node, text_to_latent
from safetensors.torch import load_file

import nativedit
from nativedit.cli import main
from nativedit.engine import calibrate as engine_calibrate
from nativedit.engine.errors import NodeError
from nativedit.quant.calibration import read_calibration
from nativedit.quant.craft import Craft


def _calibrate(models: Path, destination: Path, graph, **options):
    return engine_calibrate.calibrate(graph, destination, models_dir=models, progress=False, **options)


def test_every_linear_layer_of_the_sampled_model_is_watched(run, models: Path, tmp_path: Path):
    found = _calibrate(models, tmp_path / "stats.safetensors", text_to_latent(), steps=2)
    weights = load_file(models / "diffusion_models" / "tiny.safetensors")
    wide = {key.removesuffix(".weight") for key, value in weights.items() if value.ndim == 2 and ".mlp." in key}
    assert wide and wide <= found.layers.keys()
    for name in wide:
        assert found.layers[name].amax.shape == (weights[f"{name}.weight"].shape[1],)
    assert found.about["steps"] == 2 and found.about["model"] == "tiny.safetensors"


def test_more_steps_see_more_inputs(run, models: Path, tmp_path: Path):
    rows = [
        _calibrate(models, tmp_path / f"{steps}.safetensors", text_to_latent(), steps=steps).about["rows"]
        for steps in (1, 3)
    ]
    assert rows[1] == 3 * rows[0]


def test_a_run_before_does_not_leave_the_sampler_out(run, models: Path, tmp_path: Path):
    run(text_to_latent(steps=2))
    found = _calibrate(models, tmp_path / "stats.safetensors", text_to_latent(steps=2))
    assert found.layers


def test_the_node_gives_the_same_statistics(run, models: Path, tmp_path: Path):
    graph = text_to_latent(model="tiny_bf16.safetensors")
    settings = {"positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0], "seed": 3}
    sample = node("NativeDiTSample", model=["model", 0], **settings, steps=2, cfg=1.0)
    sample["inputs"] |= {"sampler_name": "auto", "scheduler": "auto", "shift": 0.0, "denoise": 1.0}
    by_command = _calibrate(models, tmp_path / "stats.safetensors", {**graph, "sampler": sample})
    watch = node("NativeDiTCalibrateModel", model=["model", 0], **settings, steps=2, cfg=1.0, filename_prefix="c/stats")
    del graph["sampler"], graph["save"]
    path = Path(run({**graph, "watch": watch}).outputs["watch"][0])
    by_node = read_calibration(path)
    assert path.name == "stats_00001_.safetensors"
    assert by_node.layers.keys() == by_command.layers.keys()
    for name, inputs in by_node.layers.items():
        assert torch.equal(inputs.amax, by_command.layers[name].amax), name


def test_the_command_makes_what_quantize_takes(run, models: Path, tmp_path: Path, capsys):
    import json

    workflow, stats = tmp_path / "workflow.json", tmp_path / "stats.safetensors"
    workflow.write_text(json.dumps(text_to_latent(model="tiny_bf16.safetensors")))
    arguments = ["calibrate", str(workflow), "--steps", "1", "-o", str(stats), "--models-dir", str(models), "--quiet"]
    assert main(arguments) == 0
    assert "layers" in capsys.readouterr().out
    source, target = models / "diffusion_models" / "tiny_bf16.safetensors", tmp_path / "fp8.safetensors"
    command = [
        "quantize",
        str(source),
        str(target),
        "--format",
        "float8_e4m3fn",
        "--calibration",
        str(stats),
        "--quiet",
    ]
    assert main(command) == 0
    written, found = load_file(target), read_calibration(stats)
    scales = {key.removesuffix(".input_scale"): value for key, value in written.items() if key.endswith(".input_scale")}
    assert scales
    for name, scale in scales.items():
        assert float(scale) == pytest.approx(float(found.layers[name].amax.amax()) / 448, rel=1e-6)
    report = nativedit.quantize(source, tmp_path / "n.safetensors", format="nvfp4", craft=Craft(calibration=found))
    assert not report.warnings


def test_two_models_in_one_workflow_are_refused(run, models: Path, tmp_path: Path):
    first, second = text_to_latent(), text_to_latent(model="tiny_bf16.safetensors")
    graph = {**first, "model2": second["model"], "sampler2": second["sampler"], "save2": second["save"]}
    graph["sampler2"] = node("KSampler", **{**second["sampler"]["inputs"], "model": ["model2", 0]})
    graph["save2"] = node("SaveLatent", samples=["sampler2", 0], filename_prefix="latents/second")
    with pytest.raises(NodeError, match=r"samples tiny.*and tiny.*statistics are of one model"):
        _calibrate(models, tmp_path / "stats.safetensors", graph, steps=1)
    assert not (tmp_path / "stats.safetensors").exists()


def test_a_missing_folder_is_noticed_before_anything_is_sampled(tmp_path: Path, capsys):
    command = ["calibrate", str(tmp_path / "no_workflow.json"), "-o", str(tmp_path / "gone" / "stats.safetensors")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "there is no folder" in error and "gone" in error and "no_workflow" not in error


def test_a_workflow_is_not_replaced_by_its_statistics(models: Path, tmp_path: Path, capsys):
    import json

    workflow = tmp_path / "workflow.json"
    workflow.write_text(json.dumps(text_to_latent()))
    before = workflow.read_bytes()
    assert main(["calibrate", str(workflow), "-o", str(workflow), "--models-dir", str(models)]) == 2
    assert "is the source itself" in capsys.readouterr().err
    assert workflow.read_bytes() == before
