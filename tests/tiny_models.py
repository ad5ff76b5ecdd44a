"""Tiny models of every architecture that core has, with random weights, in both worlds' constructor arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_MMDIT = {"attention_head_dim": 128, "num_attention_heads": 2, "axes_dims_rope": (16, 56, 56)}

# Row of the layouts' table -> (diffusers class, its arguments). Head sizes are the published ones: cards and ComfyUI
# take them for granted.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "z_image": (
        "ZImageTransformer2DModel",
        {"dim": 384, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 3, "n_kv_heads": 3, "cap_feat_dim": 48},
    ),
    "qwen_image": (
        "QwenImageTransformer2DModel",
        {"num_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 48},
    ),
    "flux_dev": (
        "FluxTransformer2DModel",
        {
            **_MMDIT,
            "num_layers": 2,
            "num_single_layers": 2,
            "joint_attention_dim": 40,
            "pooled_projection_dim": 24,
            "guidance_embeds": True,
        },
    ),
    "flux_schnell": (
        "FluxTransformer2DModel",
        {
            **_MMDIT,
            "num_layers": 1,
            "num_single_layers": 2,
            "joint_attention_dim": 40,
            "pooled_projection_dim": 24,
            "guidance_embeds": False,
        },
    ),
    "flux2_dev": (
        "Flux2Transformer2DModel",
        {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 40},
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {
            **_MMDIT,
            "num_layers": 2,
            "num_single_layers": 2,
            "joint_attention_dim": 40,
            "approximator_hidden_dim": 64,
            "approximator_layers": 2,
        },
    ),
    "wan21_t2v_14b": (
        "WanTransformer3DModel",
        {"num_attention_heads": 2, "text_dim": 40, "ffn_dim": 96, "num_layers": 2},
    ),
    "wan21_i2v_14b": (
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "in_channels": 36,
            "text_dim": 40,
            "ffn_dim": 96,
            "num_layers": 2,
            "image_dim": 1280,
            "added_kv_proj_dim": 256,
        },
    ),
    "krea2": (
        "Krea2Transformer2DModel",
        {
            "num_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 1408,
            "text_hidden_dim": 256,
            "num_text_layers": 3,
            "text_num_attention_heads": 2,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 768,
        },
    ),
    "ernie_image": (
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 256,
            "num_attention_heads": 2,
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "in_channels": 32,
            "out_channels": 32,
            "text_in_dim": 48,
        },
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {
            "hidden_size": 384,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "cap_feat_dim": 48,
            "multiple_of": 256,
        },
    ),
    "sd35_large": (
        "SD3Transformer2DModel",
        {
            "num_layers": 3,
            "num_attention_heads": 3,
            "joint_attention_dim": 40,
            "caption_projection_dim": 192,
            "pooled_projection_dim": 24,
            "pos_embed_max_size": 12,
            "qk_norm": "rms_norm",
        },
    ),
    "sd35_medium": (
        "SD3Transformer2DModel",
        {
            "num_layers": 3,
            "num_attention_heads": 3,
            "joint_attention_dim": 40,
            "caption_projection_dim": 192,
            "pooled_projection_dim": 24,
            "pos_embed_max_size": 12,
            "qk_norm": "rms_norm",
            "dual_attention_layers": (0, 1),
        },
    ),
    "minimax_h3": (
        "MiniMaxH3Transformer3DModel",
        {
            "num_attention_heads": 2,
            "hidden_size": 128,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "ffn_dim": 96,
            "text_dim": 40,
            "time_embed_hidden_dim": 64,
            "time_embed_dim": 48,
        },
    ),
}


def tiny_module(row: str, arguments: dict[str, Any] | None = None) -> torch.nn.Module:
    """The diffusers model with random weights, biases and norms too; ``arguments`` instead of the table's."""
    import diffusers

    name, own = TINY[row]
    arguments = own if arguments is None else arguments
    torch.manual_seed(len(row))
    module = getattr(diffusers, name)(**arguments).eval().requires_grad_(False)
    for key, value in module.state_dict().items():
        if value.is_floating_point() and not key.startswith("pos_embed.pos_embed"):
            value.copy_(torch.randn(value.shape) * 0.05 + (0.7 if "norm" in key and value.ndim == 1 else 0.0))
    return module


def write_folder(folder: Path, module: torch.nn.Module, *, shards: int = 1, dtype: torch.dtype | None = None) -> Path:
    """A diffusers folder: weights in ``shards`` files, and config.json as diffusers writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.contiguous().to(dtype or value.dtype) for key, value in module.state_dict().items()}
    keys = list(state)
    stem = "diffusion_pytorch_model"
    if shards == 1:
        save_file(state, folder / f"{stem}.safetensors", {"format": "pt"})
    else:
        weight_map = {}
        for number in range(shards):
            name = f"{stem}-{number + 1:05d}-of-{shards:05d}.safetensors"
            own = keys[number::shards]
            save_file({key: state[key] for key in own}, folder / name, {"format": "pt"})
            weight_map.update(dict.fromkeys(own, name))
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(module.to_json_string())
    return folder
