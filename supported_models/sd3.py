"""Stable Diffusion 3 and 3.5. ComfyUI's core loads them."""
# 3.5 large and medium, 3 medium, by Stability AI.
# Sources: ComfyUI 0.33.0 (class, detection), diffusers 0.42.1 (class, single-file converter), the file names of
# comfyui-workflow-templates-json 0.1.123. ComfyUI states no dtypes for it: UNVERIFIED here, bfloat16 and float32.

from __future__ import annotations

import math
from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub
from ._two_way import PARAMETER, WEIGHT, WEIGHT_BIAS, Rule, TwoWayMap, depth

HEAD_DIM = 64
_TIME, _OURS, _THEIRS = "time_text_embed.", "joint_blocks.#.", "transformer_blocks.#."


def _attention(
    stream: str, theirs: str, names: tuple[str, ...], norms: tuple[str, str], group: str
) -> tuple[Rule, ...]:
    ours = f"{_OURS}{stream}."
    return (
        Rule(ours + "qkv", tuple(f"{_THEIRS}{theirs}.{name}" for name in names), WEIGHT_BIAS, group=group),
        # 3.0 has no norms
        Rule(ours + "ln_q", f"{_THEIRS}{theirs}.{norms[0]}", WEIGHT, group=f"norms {group}"),
        Rule(ours + "ln_k", f"{_THEIRS}{theirs}.{norms[1]}", WEIGHT, group=f"norms {group}"),
    )


_X, _CONTEXT = _OURS + "x_block.", _OURS + "context_block."
_LAST = _CONTEXT + "adaLN_modulation.1"

DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker="pos_embed.proj.weight",
    prefixes=("", "transformer."),
    rules=(
        Rule("pos_embed", "pos_embed.pos_embed", PARAMETER),
        Rule("x_embedder.proj", "pos_embed.proj", WEIGHT_BIAS),
        Rule("t_embedder.mlp.0", _TIME + "timestep_embedder.linear_1", WEIGHT_BIAS),
        Rule("t_embedder.mlp.2", _TIME + "timestep_embedder.linear_2", WEIGHT_BIAS),
        Rule("y_embedder.mlp.0", _TIME + "text_embedder.linear_1", WEIGHT_BIAS),
        Rule("y_embedder.mlp.2", _TIME + "text_embedder.linear_2", WEIGHT_BIAS),
        Rule("context_embedder", "context_embedder", WEIGHT_BIAS),
        *_attention("x_block.attn", "attn", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), ""),
        *_attention(
            "context_block.attn",
            "attn",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
            "",
        ),
        # 3.5 medium has a second attention in its first blocks
        *_attention("x_block.attn2", "attn2", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "second attention #"),
        Rule(_X + "attn2.proj", _THEIRS + "attn2.to_out.0", WEIGHT_BIAS, group="second attention #"),
        Rule(_X + "attn.proj", _THEIRS + "attn.to_out.0", WEIGHT_BIAS),
        Rule(_X + "mlp.fc1", _THEIRS + "ff.net.0.proj", WEIGHT_BIAS),
        Rule(_X + "mlp.fc2", _THEIRS + "ff.net.2", WEIGHT_BIAS),
        Rule(_X + "adaLN_modulation.1", _THEIRS + "norm1.linear", WEIGHT_BIAS),
        # nothing reads the text after the last block
        Rule(_CONTEXT + "attn.proj", _THEIRS + "attn.to_add_out", WEIGHT_BIAS, block="not last"),
        Rule(_CONTEXT + "mlp.fc1", _THEIRS + "ff_context.net.0.proj", WEIGHT_BIAS, block="not last"),
        Rule(_CONTEXT + "mlp.fc2", _THEIRS + "ff_context.net.2", WEIGHT_BIAS, block="not last"),
        Rule(_LAST, _THEIRS + "norm1_context.linear", WEIGHT_BIAS, block="not last"),
        # ours is (shift, scale), diffusers' (scale, shift), where there are but two
        Rule(_LAST, _THEIRS + "norm1_context.linear", WEIGHT_BIAS, block="last", swapped=True),
        Rule("final_layer.linear", "proj_out", WEIGHT_BIAS),
        Rule("final_layer.adaLN_modulation.1", "norm_out.linear", WEIGHT_BIAS, swapped=True),
    ),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class."""
    embed = shapes["x_embedder.proj.weight"]
    width, patch_size = embed[0], embed[2]
    layers = depth(shapes, "joint_blocks")
    normed = "joint_blocks.0.x_block.attn.ln_q.weight" in shapes
    heads = width // HEAD_DIM
    dual = [i for i in range(layers) if f"joint_blocks.{i}.x_block.attn2.qkv.weight" in shapes]
    return {
        "patch_size": patch_size,
        "in_channels": embed[1],
        "num_layers": layers,
        "attention_head_dim": HEAD_DIM,
        "num_attention_heads": heads,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": width,
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "out_channels": shapes["final_layer.linear.bias"][0] // patch_size**2,
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "dual_attention_layers": dual,
        "qk_norm": "rms_norm" if normed else None,
    }


ARCHITECTURE = Architecture(
    name="sd3",
    title="Stable Diffusion 3 / 3.5",
    license="",
    repositories=("stabilityai/stable-diffusion-3.5-large", "stabilityai/stable-diffusion-3.5-medium"),
    defaults=None,
    signature=(
        "x_embedder.proj.weight",
        "pos_embed",
        "context_embedder.weight",
        "y_embedder.mlp.0.weight",
        "joint_blocks.0.context_block.attn.qkv.weight",
        "joint_blocks.0.x_block.attn.qkv.weight",
        "final_layer.linear.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format=None,
    dtypes=("bfloat16", "float32"),
    quantization=CardPolicy(
        blocks=DIFFUSERS.globs(
            "joint_blocks.*.attn.qkv",
            "joint_blocks.*.attn2.qkv",
            "joint_blocks.*.attn.proj",
            "joint_blocks.*.attn2.proj",
            "joint_blocks.*.mlp.fc[12]",
        ),
        never=DIFFUSERS.never(
            ("joint_blocks.*.adaLN_modulation.1", "modulation: every token depends on it"),
            ("x_embedder.proj", "the first layer, a convolution"),
            ("context_embedder", "the text's only projection"),
            ("t_embedder.*", "the timestep enters here, in one row"),
            ("y_embedder.*", "the pooled text enters here, in one row"),
            ("final_layer.*", "the last layer, straight into the latent, and its modulation"),
        ),
        layout="float8_e4m3fn",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="SD3Transformer2DModel",
    files={"checkpoints": ("sd3.5_large_fp8_scaled.safetensors",)},
    downloads=hub("Comfy-Org/stable-diffusion-3.5-fp8", "sd3.5_large_fp8_scaled.safetensors", folder=""),
)
