"""Quantized text encoders of every dialect in Load Text Encoder (NativeDiT), in a running ComfyUI."""

from __future__ import annotations

import json
from pathlib import Path

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import node, text_to_latent
from comfyui_server import Server, at_least
from support import rel_err

import nativedit
from nativedit.quant.formats import FORMATS

pytestmark = pytest.mark.comfyui

WIDE = {**files.TEXT, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SOURCE = "dialects.safetensors"
Tensors = dict[str, torch.Tensor]


def encoded(server: Server, file: str) -> torch.Tensor:
    made = text_to_latent(clip=file, own_clip_loader=True)
    report = node("ProbeConditioning", conditioning=["positive", 0])
    outputs = server.run({"clip": made["clip"], "positive": made["positive"], "report": report})
    return torch.tensor(outputs["report"]["states"])


@pytest.fixture(scope="module")
def folder(server: Server) -> Path:
    found = server.models("text_encoders")
    state = files.text_state(dtype=torch.bfloat16, config=WIDE) | files.tokenizer_tensor()
    files.save_file(state, found / SOURCE, files.FOR_PRX_PIXEL)
    return found


def layers_of(state: Tensors) -> list[str]:
    return [key.removesuffix(".comfy_quant") for key in state if key.endswith(".comfy_quant")]


def markers_in_the_header(state: Tensors) -> tuple[Tensors, dict[str, str]]:
    claims = {layer: json.loads(bytes(state.pop(f"{layer}.comfy_quant").tolist())) for layer in layers_of(state)}
    return state, {"_quantization_metadata": json.dumps({"layers": claims})}


def scales_alone(state: Tensors) -> tuple[Tensors, dict[str, str]]:
    return {key: value for key, value in state.items() if not key.endswith(".comfy_quant")}, {}


def legacy(state: Tensors) -> tuple[Tensors, dict[str, str]]:
    for layer in layers_of(state):
        del state[f"{layer}.comfy_quant"]
        state[f"{layer}.scale_weight"] = state.pop(f"{layer}.weight_scale")
    return {**state, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, {}


DIALECTS = {
    "markers": lambda state: (state, {}),
    "markers in the header": markers_in_the_header,
    "scales alone": scales_alone,
    "legacy scaled_fp8": legacy,
}


@pytest.mark.parametrize("embedding", [False, True], ids=["layers", "embedding too"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_float8_in_every_dialect_encodes_as_its_weights_say(
    server: Server, folder: Path, dialect: str, embedding: bool
):
    if embedding and not at_least(server.comfyui, FORMATS["float8_e4m3fn"].since["embedding"]):
        pytest.skip("this ComfyUI holds no quantized embedding: see test_quantized.py")
    if embedding and dialect == "legacy scaled_fp8":
        pytest.skip("the legacy form knows linear layers alone")
    name = f"{dialect.replace(' ', '_')}_{embedding}.safetensors"
    _quantize(folder, name, "float8_e4m3fn", embedding)
    reference = _undone(server, folder, name)

    state, header = DIALECTS[dialect](dict(files.tensors(folder / name)))
    files.save_file(state, folder / name, {**files.FOR_PRX_PIXEL, **header})

    assert rel_err(encoded(server, name), reference) < 0.02


@pytest.mark.parametrize("recipe", ["int8_convrot", "nvfp4"])
def test_markers_in_the_header_alone_are_read(server: Server, folder: Path, recipe: str):
    if not at_least(server.comfyui, "0.29.0") and recipe != "nvfp4":
        pytest.skip("this ComfyUI has no int8")
    name = f"header_{recipe}.safetensors"
    _quantize(folder, name, recipe, False)
    reference = _undone(server, folder, name)

    state, header = markers_in_the_header(dict(files.tensors(folder / name)))
    files.save_file(state, folder / name, {**files.FOR_PRX_PIXEL, **header})

    assert rel_err(encoded(server, name), reference) < 0.03


def test_int8_with_a_quantized_embedding(server: Server, folder: Path):
    if not at_least(server.comfyui, FORMATS["int8_tensorwise"].since["embedding"]):
        pytest.skip("this ComfyUI holds no quantized embedding: see test_quantized.py")
    _quantize(folder, "int8_embedding.safetensors", "int8_tensorwise", True)

    assert rel_err(encoded(server, "int8_embedding.safetensors"), encoded(server, SOURCE)) < 0.05


def test_a_factor_of_the_input_is_applied_by_every_comfyui(server: Server, folder: Path):
    """nvfp4 with pre_quant_scale: ComfyUI applies it from 0.30 on, before that such a layer is loaded as a float."""
    state = dict(files.tensors(folder / SOURCE))
    factors = {}
    for key, value in state.items():
        if key.endswith("mlp.up_proj.weight"):
            factor = torch.linspace(0.5, 2.0, value.shape[1])
            state[key] = (value.float() / factor).to(torch.bfloat16)
            factors[key.removesuffix("weight") + "pre_quant_scale"] = factor.to(torch.bfloat16)
    files.save_file(state, folder / "scaled.safetensors", files.FOR_PRX_PIXEL)
    _quantize(folder, "pre_quant.safetensors", "nvfp4", False, source="scaled.safetensors")
    state = {**files.tensors(folder / "pre_quant.safetensors"), **factors}
    files.save_file(state, folder / "pre_quant.safetensors", files.FOR_PRX_PIXEL)

    states = encoded(server, "pre_quant.safetensors")

    assert rel_err(states, _undone(server, folder, "pre_quant.safetensors")) < 0.02
    assert rel_err(states, encoded(server, SOURCE)) < 0.3


def _quantize(folder: Path, name: str, recipe: str, embedding: bool, source: str = SOURCE) -> None:
    include = ["embed_tokens"] if embedding else []
    options = {"policy": {"min_weights": 1000}, "include": include, "device": "cpu"}
    nativedit.quantize(folder / source, folder / name, format=recipe, **options)


def _undone(server: Server, folder: Path, name: str) -> torch.Tensor:
    nativedit.dequantize(folder / name, folder / f"undone_{name}")
    return encoded(server, f"undone_{name}")
