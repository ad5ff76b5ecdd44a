"""The quantization nodes in graphs on a running ComfyUI: from file to latent, and from graph to file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import node, text_to_latent, with_model_node
from comfyui_server import GraphError, Server, at_least
from support import rel_err

pytestmark = pytest.mark.comfyui

MODEL = "tiny_bf16.safetensors"


def graph(precision: str = "as stored", model: str = MODEL, **options: Any) -> dict[str, Any]:
    made = text_to_latent(model=model, cfg=1.0, loader="NativeDiTLoadDiffusionModel", **options)
    made["model"]["inputs"]["precision"] = precision
    made["clip"]["inputs"]["architecture"] = "prx_pixel"
    return made


def best(server: Server) -> str:
    return "int8_tensorwise" if at_least(server.comfyui, "0.29.0") else "float8_e4m3fn"


def save(server: Server, made: dict[str, Any], source: str = "model", **options: Any) -> Path:
    """Through our node, and into the models folder."""
    inputs = {"filename_prefix": "quant/model", "precision": "as stored", "policy": "card"} | options
    nodes = {key: made[key] for key in ("model", "quantize", "lora") if key in made}
    nodes["save"] = node("NativeDiTSaveDiffusionModel", model=[source, 0], **inputs)
    [file] = server.run(nodes)["save"]["files"]
    target = server.models("diffusion_models") / f"reloaded_{file['filename']}"
    shutil.copy(server.file_of(file), target)
    return target


def test_loading_quantized_saving_and_core_loading_is_one_latent(server: Server, latent: Callable):
    name = best(server)
    quantized = latent(graph(name))
    file = save(server, graph(name))

    again = latent({**graph(), "model": node("UNETLoader", unet_name=file.name, weight_dtype="default")})

    assert rel_err(again, quantized) < 1e-2  # int8 inputs are rounded anew where BLAS rounds by alignment
    assert 1e-4 < rel_err(quantized, latent(graph())) < 0.1
    assert sum(key.endswith(".comfy_quant") for key in files.tensors(file)) > 3


def test_a_budget_mixes_formats_on_load_and_in_the_graph(server: Server, latent: Callable):
    """Formats of this ComfyUI; core loads the saved mixture to the same latent, and the graph shows the report."""
    size = (server.models("diffusion_models") / MODEL).stat().st_size / 1e9
    made = graph()
    made["model"]["inputs"] |= {"target_size": 0.8 * size, "min_sqnr": 0.0}
    file = save(server, made)
    markers = {bytes(value.tolist()) for key, value in files.tensors(file).items() if key.endswith(".comfy_quant")}
    # ComfyUI 0.8 holds no integers, and of its formats one fits this size.
    assert len(markers) > int(at_least(server.comfyui, "0.29"))
    again = latent({**graph(), "model": node("UNETLoader", unet_name=file.name, weight_dtype="default")})
    assert rel_err(again, latent(made)) < 1e-2
    assert 1e-4 < rel_err(again, latent(graph())) < 0.5

    inputs = {"format": "auto", "policy": "card", "keep": "", "target_size": 0.0, "min_sqnr": 25.0}
    nodes = {"model": graph()["model"], "quantize": node("NativeDiTQuantizeModel", model=["model", 0], **inputs)}
    nodes["picture"] = node("PreviewImage", images=["quantize", 2])
    nodes["save"] = node(
        "NativeDiTSaveDiffusionModel",
        model=["quantize", 0],
        filename_prefix="quant/budget",
        precision="as stored",
        policy="card",
    )
    outputs = server.run(nodes)
    assert server.file_of(outputs["picture"]["images"][0]).stat().st_size > 5000
    saved = files.tensors(server.file_of(outputs["save"]["files"][0]))
    assert any(key.endswith(".comfy_quant") for key in saved)


def test_a_graph_may_quantize_after_a_lora(server: Server, latent: Callable):
    lora = {"lora_name": "dit_comfy.safetensors", "strength_model": 0.2}
    plain = with_model_node(graph(), "lora", "LoraLoaderModelOnly", **lora)
    quantized = with_model_node(
        plain, "quantize", "NativeDiTQuantizeModel", format=best(server), policy="card", keep=""
    )

    assert 1e-4 < rel_err(latent(quantized), latent(plain)) < 0.1
    assert torch.equal(latent(plain), latent(plain))


def test_a_baked_lora_gives_the_latent_of_the_lora(server: Server, latent: Callable):
    lora = {"lora_name": "dit_comfy.safetensors", "strength_model": 1.0}
    patched = with_model_node(graph(), "lora", "LoraLoaderModelOnly", **lora)
    file = save(server, patched, "lora")

    assert rel_err(latent(graph(model=file.name)), latent(patched)) < 1e-5


def test_the_diffusion_model_of_a_checkpoint_is_quantized_on_load(server: Server, latent: Callable):
    server.get("/object_info/NativeDiTLoadDiffusionModel")
    made = graph(best(server), model="checkpoints/tiny_all.safetensors")

    assert 1e-4 < rel_err(latent(made), latent(graph(model="tiny.safetensors"))) < 0.1


def test_a_text_encoder_and_a_vae_are_saved_and_load_again(server: Server, latent: Callable):
    clip = node(
        "NativeDiTLoadTextEncoder", file="tiny_text.safetensors", architecture="prx_pixel", precision="as stored"
    )
    nodes = {
        "clip": clip,
        "save": node(
            "NativeDiTSaveTextEncoder", clip=["clip", 0], filename_prefix="te/x", precision="as stored", policy="card"
        ),
    }
    [file] = server.run(nodes)["save"]["files"]
    target = server.models("text_encoders") / "saved_by_node.safetensors"
    shutil.copy(server.file_of(file), target)

    again = graph(clip="saved_by_node.safetensors")

    source = files.tensors(server.models("text_encoders") / "tiny_text.safetensors")
    written = files.tensors(target)
    assert written.keys() - source.keys() <= {"text_encoder_config"}
    assert all(torch.equal(value, written[key]) for key, value in source.items())
    assert torch.equal(latent(again), latent(graph()))


@pytest.mark.parametrize("dialect", ["scales without a marker", "float8 norms"])
def test_odd_dialects_load_in_our_loader(server: Server, latent: Callable, dialect: str):
    file = save(server, graph("float8_e4m3fn"))
    state = files.tensors(file)
    if dialect == "scales without a marker":
        odd = {key: value for key, value in state.items() if not key.endswith(".comfy_quant")}
    else:
        norms = [key for key, value in state.items() if value.ndim == 1 and key.endswith("norm.weight")]
        odd = {**state, **{key: state[key].to(torch.float8_e4m3fn) for key in norms[:2]}}
    files.save_file(odd, server.models("diffusion_models") / "odd_dialect.safetensors")

    assert rel_err(latent(graph(model="odd_dialect.safetensors")), latent(graph(model=file.name))) < 0.05


def test_reports_have_text_and_pictures(server: Server):
    nodes = {
        "model": graph()["model"],
        "other": graph(best(server))["model"],
        "compare": node("NativeDiTCompareModels", reference=["model", 0], model=["other", 0]),
        "inspect": node("NativeDiTInspectCheckpoint", file=f"diffusion_models/{MODEL}"),
        "one": node("PreviewImage", images=["compare", 1]),
        "two": node("PreviewImage", images=["inspect", 1]),
    }
    outputs = server.run(nodes)

    assert "dB" in outputs["compare"]["text"][0] and "differ" in outputs["compare"]["text"][0]
    assert "BF16" in outputs["inspect"]["text"][0]
    assert server.file_of(outputs["one"]["images"][0]).stat().st_size > 1000
    assert server.file_of(outputs["two"]["images"][0]).stat().st_size > 1000


def test_a_format_that_this_comfyui_lacks_is_one_sentence(server: Server):
    if at_least(server.comfyui, "0.31.0"):
        pytest.skip("this ComfyUI has all formats")
    with pytest.raises(GraphError, match=r"can't be quantized to asym_w4a8_int8: ComfyUI .* it needs 0\.31"):
        server.run(graph("asym_w4a8_int8"))


def test_core_loading_of_the_same_file_does_not_pass_by_our_quantizer(server: Server, latent: Callable):
    before = latent({**graph(), "model": node("UNETLoader", unet_name=MODEL, weight_dtype="default")})
    latent(graph(best(server)))

    after = latent({**graph(seed=7), "model": node("UNETLoader", unet_name=MODEL, weight_dtype="default")})

    assert torch.equal(after, before)
