"""A tiny Nucleus-Image with random weights, as the files that people have: the published transformer's layout, Qwen3-VL
with its tokenizer, Qwen-Image's autoencoder in Wan's layout (ComfyUI's), named as the example workflow names them."""

from __future__ import annotations

import json
from pathlib import Path

import comfyui_files as files
import torch
from comfyui_graphs import Graph, node
from safetensors.torch import save_file
from support import ROOT

# Head, strategy and capacities as published, so that shapes and card tell all of it.
DIT = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 5,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "joint_attention_dim": 32,
    "axes_dims_rope": (16, 56, 56),
    "dense_moe_strategy": "leave_first_three_blocks_dense",
    "num_experts": 8,
    "moe_intermediate_dim": 64,
    "capacity_factors": [0.0, 0.0, 0.0, 4.0, 4.0],
}
# The model reads the eighth state from the end.
TEXT = files.TEXT | {"num_hidden_layers": 10}
NAMES = {
    "diffusion_models": "nucleus_image_bf16.safetensors",
    "text_encoders": "qwen3vl_8b_bf16.safetensors",
    "vae": "qwen_image_vae.safetensors",
}


def dit_state(seed: int = 5) -> dict[str, torch.Tensor]:
    """In our layout."""
    from nativedit.ldm.nucleus.model import NucleusMoEImageTransformer2DModel

    return files.random_state(NucleusMoEImageTransformer2DModel(**DIT, device="meta"), seed)


def published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Banks as the publisher stores them."""
    result = {}
    for key, value in state.items():
        bank = ".experts." in key
        result[key.removesuffix(".weight") if bank else key] = value.transpose(1, 2).contiguous() if bank else value
    return result


def write(models: Path) -> None:
    """Into ComfyUI's models folder."""
    from diffusers import AutoencoderKLQwenImage

    from nativedit.checkpoints.convert import convert
    from nativedit.text_encoders.language_model import LanguageModel

    for folder in NAMES:
        (models / folder).mkdir(parents=True, exist_ok=True)
    save_file(published(dit_state()), models / "diffusion_models" / NAMES["diffusion_models"])
    text = files.random_state(LanguageModel(**TEXT, device="meta"), 6)
    save_file(
        {**text, **files.tokenizer_tensor()},
        models / "text_encoders" / NAMES["text_encoders"],
        files.header("text_encoder", {"family": "qwen3_vl", **TEXT}),
    )
    torch.manual_seed(7)
    AutoencoderKLQwenImage(base_dim=8).save_pretrained(models / "diffusers_vae")
    convert(models / "diffusers_vae", models / "vae" / NAMES["vae"])


def example(size: tuple[int, int] = (96, 64), steps: int = 4) -> Graph:
    """The example workflow, smaller, with its latent saved besides the picture by the node `save`. size: width,
    height."""
    graph = json.loads((ROOT / "example_workflows" / "api" / "nucleus_image.json").read_text(encoding="utf-8"))
    small = {"NativeDiTEmptyLatent": dict(zip(("width", "height"), size, strict=True)), "KSampler": {"steps": steps}}
    for each in graph.values():
        each["inputs"] |= small.get(each["class_type"], {})
    sampler = next(key for key, each in graph.items() if each["class_type"] == "KSampler")
    return {**graph, "save": node("SaveLatent", samples=[sampler, 0], filename_prefix="latents/nucleus")}
