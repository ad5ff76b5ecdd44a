"""The quantization nodes without ComfyUI: the same graphs, the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import node, text_to_latent
from safetensors import safe_open
from safetensors.torch import load_file
from support import rel_err

import nativedit
from nativedit.engine.errors import NodeError, WorkflowError
from nativedit.quant.craft import Craft

FORMATS = ["int8_tensorwise", "float8_e4m3fn", "mxfp8", "nvfp4"]


def loader(model: str = "tiny_bf16.safetensors", precision: str = "as stored", policy: str = "card") -> dict[str, Any]:
    return node("NativeDiTLoadDiffusionModel", file=model, architecture="auto", precision=precision, policy=policy)


def saver(source: str = "model", precision: str = "as stored", prefix: str = "out/model") -> dict[str, Any]:
    return node(
        "NativeDiTSaveDiffusionModel", model=[source, 0], filename_prefix=prefix, precision=precision, policy="card"
    )


def written(result, node_id: str = "save") -> Path:
    return Path(result.outputs[node_id][0])


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert value.dtype == second[key].dtype and torch.equal(value.float(), second[key].float()), key


def test_what_is_saved_is_what_was_loaded(run, models: Path):
    result = run({"model": loader(), "save": saver()})
    path = written(result)

    assert result.files == [path] and not result.pictures
    same(load_file(path), load_file(models / "diffusion_models" / "tiny_bf16.safetensors"))
    assert path.name == "model_00001_.safetensors"


@pytest.mark.parametrize("name", FORMATS)
def test_loading_quantizing_and_saving_give_the_file_that_the_command_makes(
    run, models: Path, tmp_path: Path, name: str
):
    source = models / "diffusion_models" / "tiny_bf16.safetensors"
    nativedit.quantize(source, tmp_path / "wanted.safetensors", format=name)
    wanted = load_file(tmp_path / "wanted.safetensors")
    assert any(key.endswith(".comfy_quant") for key in wanted)

    on_load = run({"model": loader(precision=name), "save": saver()})
    quantize = node("NativeDiTQuantizeModel", model=["model", 0], format=name, policy="card", keep="")
    graph = {"model": loader(), "quantize": quantize, "save": saver("quantize")}
    in_graph = run(graph)
    on_save = run({"model": loader(), "save": saver(precision=name)})

    same(load_file(written(on_load)), wanted)
    same(load_file(written(in_graph)), wanted)
    same(load_file(written(on_save)), wanted)


@pytest.fixture
def budget(models: Path, tmp_path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A budget for nodes, and the weights that the command gives within it."""
    source = models / "diffusion_models" / "tiny_bf16.safetensors"
    wish = int(source.stat().st_size * 0.8)
    report = nativedit.quantize(source, tmp_path / "wanted.safetensors", target_size=wish)
    assert len({str(decision.recipe) for decision in report.quantized}) > 1
    return {"target_size": wish / 1e9, "min_sqnr": 0.0}, load_file(tmp_path / "wanted.safetensors")


def test_a_budget_on_load_gives_the_weights_of_the_command(run, budget):
    wish, wanted = budget
    model = loader()
    model["inputs"] |= wish
    result = run({"model": model, "save": saver()})

    state = load_file(written(result))
    same(state, wanted)


def test_a_budget_in_the_graph_reports_each_layer_in_words_and_as_a_picture(run, models: Path):
    size = (models / "diffusion_models" / "tiny_bf16.safetensors").stat().st_size
    inputs = {"format": "auto", "policy": "card", "keep": "blocks.0.*", "target_size": 0.0, "min_sqnr": 25.0}
    quantize = node("NativeDiTQuantizeModel", model=["model", 0], **inputs)
    result = run({"model": loader(), "quantize": quantize, "save": saver("quantize")})

    _, text, picture = result.outputs["quantize"]
    assert written(result).stat().st_size < size
    assert " dB" in text and "excluded by 'blocks.0.*'" in text
    assert picture.ndim == 4 and picture.shape[-1] == 3 and picture.min() >= 0 and picture.max() <= 1


CALIBRATED = {"calibration": ["watch", 1], "rounding": "feedback", "smooth": True}


def watching() -> dict[str, Any]:
    """Nodes that calibrate the model, and the model."""
    graph = text_to_latent(model="tiny_bf16.safetensors", cfg=1.0, loader="NativeDiTLoadDiffusionModel")
    graph["clip"]["inputs"]["architecture"] = "prx_pixel"
    del graph["sampler"], graph["save"]
    conditions = {"positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0]}
    settings = {"seed": 3, "steps": 2, "cfg": 1.0, "filename_prefix": "calibration/tiny"}
    graph["watch"] = node("NativeDiTCalibrateModel", model=["model", 0], **conditions, **settings)
    return graph


@pytest.mark.parametrize("name", ["float8_e4m3fn", "nvfp4", "int8_tensorwise"])
def test_statistics_and_rounding_in_a_graph_give_the_file_of_the_command(run, models: Path, tmp_path: Path, name: str):
    quantize = node("NativeDiTQuantizeModel", model=["model", 0], format=name, policy="card", keep="")
    quantize["inputs"] |= CALIBRATED
    result = run({**watching(), "quantize": quantize, "save": saver("quantize")})
    statistics, listed = result.outputs["watch"]
    assert listed == "calibration/tiny_00001_.safetensors"

    craft = Craft.of(statistics, "feedback", True)
    wanted = tmp_path / "wanted.safetensors"
    nativedit.quantize(models / "diffusion_models" / "tiny_bf16.safetensors", wanted, format=name, craft=craft)
    suffixes = {key.rpartition(".")[2] for key in load_file(wanted)}
    assert ("input_scale" in suffixes) == (name != "int8_tensorwise")
    assert ("pre_quant_scale" in suffixes) == (name == "nvfp4")
    same(load_file(written(result)), load_file(wanted))

    given = {**CALIBRATED, "calibration": listed}  # chosen from the list, in a graph of its own
    on_load, on_save = loader(precision=name), saver(precision=name)
    on_load["inputs"] |= given
    on_save["inputs"] |= given
    same(load_file(written(run({"model": on_load, "save": saver()}))), load_file(wanted))
    same(load_file(written(run({"model": loader(), "save": on_save}))), load_file(wanted))


def test_a_budget_weighs_errors_by_the_statistics(run, models: Path, tmp_path: Path):
    source = models / "diffusion_models" / "tiny_bf16.safetensors"
    inputs = {"format": "auto", "policy": "card", "keep": "", "target_size": 0.0, "min_sqnr": 30.0}
    quantize = node("NativeDiTQuantizeModel", model=["model", 0], **inputs, calibration=["watch", 1])
    result = run({**watching(), "quantize": quantize, "save": saver("quantize")})

    craft = Craft.of(result.outputs["watch"][0], "plain", False)
    nativedit.quantize(source, tmp_path / "wanted.safetensors", min_sqnr=30, craft=craft)
    same(load_file(written(result)), load_file(tmp_path / "wanted.safetensors"))
    nativedit.quantize(source, tmp_path / "unweighted.safetensors", min_sqnr=30)
    formats = [
        {key: bytes(value.tolist()) for key, value in load_file(path).items() if key.endswith(".comfy_quant")}
        for path in (tmp_path / "wanted.safetensors", tmp_path / "unweighted.safetensors")
    ]
    assert formats[0] != formats[1]


def test_statistics_without_quantizing_and_files_that_are_gone_are_sentences(run):
    model = loader()
    model["inputs"] |= {"rounding": "feedback"}
    with pytest.raises(NodeError, match="as stored quantizes nothing"):
        run({"model": model, "save": saver()})
    model["inputs"] |= {"smooth": True}
    with pytest.raises(NodeError, match="choose a calibration too"):
        run({"model": model, "save": saver()})
    model = loader(precision="nvfp4")
    model["inputs"] |= {"calibration": "calibration/gone.safetensors"}
    with pytest.raises(ValueError, match=r"calibration can't be 'calibration/gone\.safetensors'"):
        run({"model": model, "save": saver()})


def test_a_budget_that_can_not_be_kept_and_auto_without_one_are_sentences(run):
    model = loader()
    model["inputs"] |= {"target_size": 0.000001, "min_sqnr": 0.0}
    with pytest.raises(NodeError, match=r"can't fit .* the smallest possible is"):
        run({"model": model, "save": saver()})
    quantize = node("NativeDiTQuantizeModel", model=["model", 0], format="auto", policy="card", keep="")
    with pytest.raises(NodeError, match="the format auto needs a budget"):
        run({"model": loader(), "quantize": quantize, "save": saver("quantize")})
    model["inputs"] |= {"target_size": 1.0, "precision": "float16"}
    with pytest.raises(NodeError, match="float16 is none"):
        run({"model": model, "save": saver()})


def test_a_model_quantized_on_load_samples_close_to_its_source(run):
    def latent(precision: str) -> torch.Tensor:
        graph = text_to_latent(cfg=1.0)
        graph["model"] = loader("tiny.safetensors", precision)
        graph["clip"]["inputs"]["architecture"] = "prx_pixel"
        return run(graph).outputs["sampler"][0]["samples"]

    assert 1e-5 < rel_err(latent("int8_tensorwise"), latent("as stored")) < 0.05


def test_a_baked_lora_is_saved(run, models: Path):
    lora = node("LoraLoaderModelOnly", model=["model", 0], lora_name="dit_comfy.safetensors", strength_model=1.0)
    graph = {"model": loader(), "lora": lora, "save": saver("lora")}

    state = load_file(written(run(graph)))

    plain = load_file(models / "diffusion_models" / "tiny_bf16.safetensors")
    assert state.keys() == plain.keys()
    assert any(not torch.equal(value, plain[key]) for key, value in state.items())
    assert {value.dtype for value in state.values()} == {torch.bfloat16}


def test_the_header_holds_the_configuration_and_the_workflow(run):
    graph = {"model": loader("odd.safetensors"), "save": saver()}
    path = written(run(graph))

    with safe_open(str(path), "pt") as file:
        header = file.metadata()
    assert json.loads(header["config"])["transformer"]["theta"] == files.ODD["theta"]
    assert set(json.loads(header["prompt"])) == {"model", "save"}
    module = nativedit.load_diffusion_model(path)
    assert tuple(module.axes_dim) == files.ODD["axes_dim"]


def test_a_text_encoder_is_saved_with_its_tokenizer(run, models: Path):
    as_stored = {"precision": "as stored"}
    loaded = {"file": "tiny_text.safetensors", "architecture": "prx_pixel"}
    graph = {
        "clip": node("NativeDiTLoadTextEncoder", **loaded, **as_stored),
        "save": node("NativeDiTSaveTextEncoder", clip=["clip", 0], filename_prefix="te", policy="card", **as_stored),
    }
    same(load_file(written(run(graph))), load_file(models / "text_encoders" / "tiny_text.safetensors"))


def test_layers_to_keep_are_kept_and_unknown_ones_named(run):
    quantize = node(
        "NativeDiTQuantizeModel", model=["model", 0], format="float8_e4m3fn", policy="card", keep="blocks.0.*"
    )
    state = load_file(written(run({"model": loader(), "quantize": quantize, "save": saver("quantize")})))
    assert not any(key.startswith("blocks.0.") and key.endswith(".comfy_quant") for key in state)
    assert any(key.startswith("blocks.1.") and key.endswith(".comfy_quant") for key in state)

    quantize["inputs"]["keep"] = "no.such.*"
    with pytest.raises(NodeError, match=r"no\.such"):
        run({"model": loader(), "quantize": quantize, "save": saver("quantize")})


def test_comparing_and_inspecting_are_reports_with_pictures(run):
    graph = {
        "model": loader(),
        "other": loader(precision="float8_e4m3fn"),
        "compare": node("NativeDiTCompareModels", reference=["model", 0], model=["other", 0]),
        "inspect": node("NativeDiTInspectCheckpoint", file="diffusion_models/tiny_bf16.safetensors"),
    }
    outputs = run(graph).outputs

    text, picture = outputs["compare"]
    assert "differ" in text and "dB" in text
    assert picture.ndim == 4 and picture.shape[-1] == 3
    assert "BF16" in outputs["inspect"][0] and "no problems" in outputs["inspect"][0]


def test_a_repaired_file_is_the_canonical_one(run, models: Path, tmp_path: Path):
    source = models / "diffusion_models" / "tiny_bf16.safetensors"
    wanted = models / "diffusion_models" / "sound.safetensors"
    nativedit.quantize(source, wanted, format="float8_e4m3fn", fast_matmul=True)
    bare = {key: value for key, value in load_file(wanted).items() if not key.endswith(".comfy_quant")}
    files.save_file(bare, models / "diffusion_models" / "bare.safetensors")
    graph = {
        "repair": node(
            "NativeDiTRepairCheckpoint",
            file="diffusion_models/bare.safetensors",
            filename_prefix="fixed",
            original="none",
        )
    }
    same(load_file(written(run(graph), "repair")), load_file(wanted))


def test_a_name_outside_of_the_output_folder_is_refused(run, tmp_path: Path):
    with pytest.raises(
        WorkflowError, match=r"node save \w+: input filename_prefix: \.\./outside: leaves the output folder"
    ):
        run({"model": loader(), "save": saver(prefix="../outside")})
    assert not list(tmp_path.parent.glob("outside*"))
