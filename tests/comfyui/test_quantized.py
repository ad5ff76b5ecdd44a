"""Files that `nativedit quantize` writes, in core's plain loader nodes of a running ComfyUI: every format, and sampled.

One architecture of ComfyUI's own and one of ours; text encoders of both. What a file should give is what the same file
gives once `nativedit dequantize` has undone it, and, less exactly, what its source gives.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfyui_files as files
import core_models
import pytest
import torch
from comfyui_graphs import node, text_to_latent, with_model_node
from comfyui_server import GraphError, Server, at_least
from support import rel_err

import nativedit
from nativedit.quant.formats import FORMATS, parse_recipe

pytestmark = pytest.mark.comfyui

# How far a latent may be from that of the weights themselves, and from the source's. Float formats are multiplied in
# full precision on a CPU, integer formats round the layers' inputs too.
ERRORS = {
    "float8_e4m3fn": (0.01, 0.06),
    "float8_e5m2": (0.01, 0.12),
    "mxfp8": (0.01, 0.06),
    "nvfp4": (0.01, 0.2),
    "int8_tensorwise:scale=tensor": (0.05, 0.08),
    "int8_tensorwise": (0.03, 0.04),
    "int8_tensorwise:convrot=16": (0.03, 0.04),
    "int8_tensorwise:convrot=64": (0.03, 0.04),
    "int8_convrot": (0.03, 0.04),
    "convrot_w4a4": (0.3, 0.4),
    "asym_w4a8_int8": (0.03, 0.2),
}
WIDE = {**files.DIT, "hidden_size": 256, "num_heads": 8}  # a rotation's group has 256 columns
OURS = "wide_prx.safetensors"


def cores(server: Server) -> str:
    """A tiny model of ComfyUI's own; 0.8 takes the number of FLUX's heads for granted."""
    return "flux_dev.safetensors" if at_least(server.comfyui, "0.29.0") else "wan21_t2v_14b.safetensors"


def holds(server: Server, recipe: str, kind: str = "linear") -> bool:
    since = FORMATS[parse_recipe(recipe).format].since
    return kind in since and at_least(server.comfyui, since[kind])


def skip_unless_held(server: Server, recipe: str, kind: str = "linear") -> None:
    if not holds(server, recipe, kind):
        pytest.skip(f"this ComfyUI holds no {kind} in {recipe}")


@pytest.fixture(scope="module")
def models(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of diffusion models, with a source of each architecture."""
    folder = server.models("diffusion_models")
    files.save_file(files.dit_state(WIDE, dtype=torch.bfloat16), folder / OURS, {"format": "pt"})
    core_models.write(tmp_path_factory.mktemp("core"), server.base, [Path(cores(server)).stem])
    return folder


def in_format(folder: Path, source: str, recipe: str, **options: Any) -> str:
    name = f"{Path(source).stem}_{recipe.translate(str.maketrans(':=', '__'))}.safetensors"
    nativedit.quantize(folder / source, folder / name, format=recipe, device="cpu", **options)
    return name


def dequantized(folder: Path, quantized: str) -> str:
    name = f"{Path(quantized).stem}_dequantized.safetensors"
    nativedit.dequantize(folder / quantized, folder / name)
    return name


def graph(model: str, **options: Any) -> dict[str, Any]:
    """A model into core's UNETLoader and KSampler, two steps."""
    made = text_to_latent(model=model, cfg=1.0, steps=2, **options)
    if model.startswith("flux"):
        made["positive"] = made["negative"] = node("ProbeNoiseAsText", width=40, pooled_width=24)
        made["latent"] = node("EmptySD3LatentImage", width=128, height=96, batch_size=1)
    elif model.startswith("wan"):
        made["positive"] = made["negative"] = node("ProbeNoiseAsText", width=4096, pooled_width=24)
        made["latent"] = node("EmptyHunyuanLatentVideo", width=128, height=96, length=1, batch_size=1)
    return made


@pytest.mark.parametrize("recipe", ERRORS)
@pytest.mark.parametrize("own", [False, True], ids=["core's architecture", "ours"])
def test_a_file_of_every_format_samples_as_its_weights_say(
    server: Server, models: Path, latent: Callable, own: bool, recipe: str
):
    skip_unless_held(server, recipe)
    source = OURS if own else cores(server)
    file = in_format(models, source, recipe)
    assert sum(key.endswith(".comfy_quant") for key in files.tensors(models / file)) > 3

    result, log = server.log_during(lambda: latent(graph(file)))

    of_weights, of_source = ERRORS[recipe]
    assert rel_err(result, latent(graph(dequantized(models, file)))) < of_weights
    assert 1e-4 < rel_err(result, latent(graph(source))) < of_source
    assert "unet unexpected" not in log and "unet missing" not in log


@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "int8_tensorwise"])
def test_a_quantized_model_takes_a_lora_and_survives_saving(
    server: Server, models: Path, latent: Callable, recipe: str
):
    skip_unless_held(server, recipe)
    file = in_format(models, "tiny.safetensors", recipe)
    save = {
        "model": node("UNETLoader", unet_name=file, weight_dtype="default"),
        "save": node("ModelSave", model=["model", 0], filename_prefix="quantized"),
    }
    before = set((server.base / "output").rglob("*.safetensors"))
    server.run(save)
    [saved] = set((server.base / "output").rglob("*.safetensors")) - before
    shutil.move(saved, models / "saved_quantized.safetensors")
    lora = {"lora_name": "dit_comfy.safetensors", "strength_model": 1.0}

    def with_lora(model: str) -> dict:
        return with_model_node(graph(model), "lora", "LoraLoaderModelOnly", **lora)

    result, log = server.log_during(lambda: latent(with_lora("saved_quantized.safetensors")))

    saved_weights = files.tensors(models / "saved_quantized.safetensors")
    for key, value in files.tensors(models / file).items():
        assert torch.equal(saved_weights[files.PREFIX + key].float(), value.float()), key
    # ComfyUI rounds a patched weight back to its codes at random.
    assert rel_err(result, latent(with_lora(file))) < 0.02
    assert rel_err(result, latent(graph(file))) > 1e-2
    assert "lora key not loaded" not in log


def test_formats_that_this_comfyui_lacks_are_one_sentence(server: Server, models: Path):
    lacking = [recipe for recipe in ("mxfp8", "int8_convrot", "asym_w4a8_int8") if not holds(server, recipe)]
    if not lacking:
        pytest.skip("this ComfyUI has all formats")
    for recipe in lacking:
        format_name = parse_recipe(recipe).format
        with pytest.raises(GraphError, match=rf"quantized as {format_name}, which ComfyUI .* it needs ComfyUI 0\.\d+"):
            server.run(graph(in_format(models, OURS, recipe)))


def test_weights_cast_to_fp8_on_load_still_make_a_picture(latent: Callable):
    cast = text_to_latent(cfg=1.0)
    cast["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"

    assert rel_err(latent(cast), latent(text_to_latent(cfg=1.0))) < 0.3


# ---- text encoders --------------------------------------------------------------------------------------------------

# Of states after two layers of random weights.
TEXT_ERRORS = {
    "float8_e4m3fn": 0.12,
    "float8_e5m2": 0.2,
    "mxfp8": 0.12,
    "nvfp4": 0.4,
    "int8_convrot": 0.05,
    "convrot_w4a4": 0.6,
    "asym_w4a8_int8": 0.3,
}
WIDE_TEXT = {**files.TEXT, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
SMALL_TOO = {"min_weights": 1000}


@pytest.fixture(scope="module")
def encoders(server: Server) -> Path:
    """The folder of text encoders, with a source of ours and one of ComfyUI's."""
    folder = server.models("text_encoders")
    ours = files.text_state(dtype=torch.bfloat16, config=WIDE_TEXT)
    files.save_file({**ours, **files.tokenizer_tensor()}, folder / "wide_text.safetensors", files.FOR_PRX_PIXEL)
    cores = files.text_state(dtype=torch.bfloat16, config=files.QWEN3)
    files.save_file({f"model.{key}": value for key, value in cores.items()}, folder / "qwen3.safetensors")
    return folder


def encoded(server: Server, file: str, own_clip_loader: bool = False) -> torch.Tensor:
    made = text_to_latent(clip=file, prompt="a b", own_clip_loader=own_clip_loader)
    report = node("ProbeConditioning", conditioning=["positive", 0])
    outputs = server.run({"clip": made["clip"], "positive": made["positive"], "report": report})
    return torch.tensor(outputs["report"]["states"])


@pytest.mark.parametrize("recipe", TEXT_ERRORS)
def test_our_text_encoder_of_every_format_encodes_in_cores_loader_as_its_weights_say(
    server: Server, encoders: Path, recipe: str
):
    skip_unless_held(server, recipe)
    file = in_format(encoders, "wide_text.safetensors", recipe, policy=SMALL_TOO)

    states = encoded(server, file)

    assert rel_err(states, encoded(server, dequantized(encoders, file))) < (0.3 if "w4a4" in recipe else 0.03)
    assert 1e-4 < rel_err(states, encoded(server, "wide_text.safetensors")) < TEXT_ERRORS[recipe]
    assert torch.equal(states, encoded(server, file, own_clip_loader=True))


@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "nvfp4", "int8_convrot"])
def test_cores_own_text_encoder_encodes_in_cores_loader_as_its_weights_say(server: Server, encoders: Path, recipe: str):
    skip_unless_held(server, recipe)
    if not at_least(server.comfyui, "0.29.0"):
        pytest.skip("this ComfyUI has no text encoder that is small enough")
    file = in_format(encoders, "qwen3.safetensors", recipe, policy=SMALL_TOO)
    assert sum(key.endswith(".comfy_quant") for key in files.tensors(encoders / file)) == 14

    states, log = server.log_during(lambda: encoded(server, file))

    assert rel_err(states, encoded(server, dequantized(encoders, file))) < 0.03
    assert 1e-4 < rel_err(states, encoded(server, "qwen3.safetensors")) < TEXT_ERRORS[recipe]
    assert "clip unexpected" not in log and "clip missing" not in log


@pytest.mark.parametrize("recipe", ["float8_e4m3fn", "int8_tensorwise"])
def test_a_quantized_embedding_encodes_close_to_its_source(server: Server, encoders: Path, recipe: str):
    skip_unless_held(server, recipe, "embedding")
    file = in_format(encoders, "wide_text.safetensors", recipe, policy=SMALL_TOO, include=["embed_tokens"])
    assert "embed_tokens.comfy_quant" in files.tensors(encoders / file)

    assert 1e-4 < rel_err(encoded(server, file), encoded(server, "wide_text.safetensors")) < 0.12


def test_a_quantized_embedding_is_refused_where_comfyui_has_none(server: Server, encoders: Path):
    if holds(server, "float8_e4m3fn", "embedding"):
        pytest.skip("this ComfyUI holds quantized embeddings")
    file = in_format(encoders, "wide_text.safetensors", "float8_e4m3fn", policy=SMALL_TOO, include=["embed_tokens"])

    with pytest.raises(GraphError, match=r"'embed_tokens' is quantized .* can't hold a quantized Embedding"):
        encoded(server, file)
