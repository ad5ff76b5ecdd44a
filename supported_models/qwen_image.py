"""Qwen-Image and its kinds for editing and for layers. ComfyUI's core loads them.

ComfyUI and diffusers name every weight alike; two variants differ in what a weight can't tell.
"""
# Qwen-Image, Qwen-Image-Edit (2509, 2511), Qwen-Image-Layered; 20B.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._two_way import WEIGHT, WEIGHT_BIAS, Rule, TwoWayMap, depth

# Marks Qwen-Image-Edit-2511, whose reference pictures stand at timestep 0.
TIMESTEP_ZERO = "__index_timestep_zero__"
_LAYERED = "time_text_embed.addition_t_embedding"
_BLOCK = "transformer_blocks.#."


def _same(params: tuple[str, ...], *names: str) -> tuple[Rule, ...]:
    return tuple(Rule(name, name, params) for name in names)


_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_FEED = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")

DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker="",
    rules=(
        *_same(
            WEIGHT_BIAS,
            "time_text_embed.timestep_embedder.linear_1",
            "time_text_embed.timestep_embedder.linear_2",
            "img_in",
            "txt_in",
            "norm_out.linear",
            "proj_out",
        ),
        *_same(WEIGHT, "txt_norm"),
        Rule(_LAYERED, _LAYERED, WEIGHT, group="layered"),
        *_same(WEIGHT_BIAS, *(_BLOCK + name for name in ("img_mod.1", "txt_mod.1", *_FEED))),
        *_same(WEIGHT_BIAS, *(f"{_BLOCK}attn.{name}" for name in _ATTENTION)),
        *_same(WEIGHT, *(f"{_BLOCK}attn.norm_{name}" for name in ("q", "k", "added_q", "added_k"))),
    ),
    flags={TIMESTEP_ZERO: "zero_cond_t"},
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class. Mage-Flow has the same keys with another text encoder and latent."""
    if (shapes["txt_norm.weight"][0], shapes["proj_out.bias"][0]) == (2560, 128):
        return None
    width, head_dim = shapes["img_in.bias"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    layered = _LAYERED + ".weight" in shapes
    return {
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["proj_out.bias"][0] // 4,
        "num_layers": depth(shapes, "transformer_blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": shapes["txt_norm.weight"][0],
        "zero_cond_t": TIMESTEP_ZERO in shapes,
        "use_additional_t_cond": layered,
        "use_layer3d_rope": layered,
    }


_IMAGE = ("qwen_image_2512_fp8_e4m3fn.safetensors", "qwen_image_fp8_e4m3fn.safetensors")
_EDIT = (
    "qwen_image_edit_2511_int8_convrot.safetensors",
    "qwen_image_edit_2511_fp8mixed.safetensors",
    "qwen_image_edit_2511_bf16.safetensors",
    "qwen_image_edit_2509_fp8_e4m3fn.safetensors",
    "qwen_image_edit_fp8_e4m3fn.safetensors",
)

ARCHITECTURE = Architecture(
    name="qwen_image",
    title="Qwen-Image",
    license="",
    repositories=("Qwen/Qwen-Image", "Qwen/Qwen-Image-Edit", "Qwen/Qwen-Image-Layered"),
    defaults=None,
    signature=(
        "img_in.weight",
        "img_in.bias",
        "txt_norm.weight",
        "transformer_blocks.0.img_mod.1.weight",
        "transformer_blocks.0.txt_mlp.net.0.proj.weight",
        "transformer_blocks.0.attn.add_q_proj.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "proj_out.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format=None,
    dtypes=("bfloat16", "float32"),
    quantization=CardPolicy(
        blocks=(
            *(f"transformer_blocks.*.attn.{name}" for name in _ATTENTION),
            *(f"transformer_blocks.*.{name}" for name in _FEED),
        ),
        never=(
            ("transformer_blocks.*_mod.1", "modulation: every token depends on it"),
            ("img_in", "the first layer: 64 inputs"),
            ("txt_in", "the text's only projection"),
            ("time_text_embed.*", "the timestep enters here, in one row"),
            ("norm_out.linear", "modulation of the output"),
            ("proj_out", "the last layer, straight into the latent"),
        ),
        layout="int8_convrot",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="QwenImageTransformer2DModel",
    files={
        "diffusion_models": (*_IMAGE, *_EDIT, "qwen_image_layered_bf16.safetensors"),
        "text_encoders": ("qwen_2.5_vl_7b_fp8_scaled.safetensors",),
        "vae": ("qwen_image_vae.safetensors",),
    },
    downloads={
        **hub("Comfy-Org/Qwen-Image_ComfyUI", *_IMAGE),
        **hub("Comfy-Org/Qwen-Image-Edit_ComfyUI", *_EDIT),
        **hub("Comfy-Org/Qwen-Image-Layered_ComfyUI", "qwen_image_layered_bf16.safetensors"),
        **shared("qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image_vae.safetensors"),
    },
)
