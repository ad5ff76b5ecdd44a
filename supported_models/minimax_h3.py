"""MiniMax-H3: video with sound. ComfyUI's core loads it.

The publisher's shards hold queries, keys and values interleaved by head under the same names and shapes; every single
file that was published holds them one after the other, which is what this card means by them.
"""
# By MiniMax, 33B.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class, single-file converter), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._two_way import WEIGHT, WEIGHT_BIAS, Rule, TwoWayMap, depth


def _block(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{ours}.#.attn.qkv_proj", tuple(f"{theirs}.#.attn.to_{x}" for x in "qkv"), WEIGHT),
        Rule(f"{ours}.#.attn.out_proj", f"{theirs}.#.attn.to_out.0", WEIGHT),
        Rule(f"{ours}.#.attn.q_norm", f"{theirs}.#.attn.norm_q", WEIGHT),
        Rule(f"{ours}.#.attn.k_norm", f"{theirs}.#.attn.norm_k", WEIGHT),
        # ours is (gate, value), diffusers' (value, gate)
        Rule(f"{ours}.#.mlp.fc1", f"{theirs}.#.ff.net.0.proj", WEIGHT, swapped=True),
        Rule(f"{ours}.#.mlp.fc2", f"{theirs}.#.ff.net.2", WEIGHT),
        Rule(f"{ours}.#.norm1", f"{theirs}.#.norm1", WEIGHT),
        Rule(f"{ours}.#.norm2", f"{theirs}.#.norm2", WEIGHT),
    )


DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker="token_refiner.refiner_blocks.0.norm1.weight",
    prefixes=("", "transformer."),
    rules=(
        Rule("video_patch_proj", "proj_in", WEIGHT_BIAS),
        Rule("audio_patch_proj", "audio_proj_in", WEIGHT_BIAS),
        Rule("condition_proj", "context_embedder", WEIGHT_BIAS),
        Rule("time_embedder.proj_in", "time_embedder.linear_1", WEIGHT_BIAS, group="time"),
        Rule("time_embedder.proj_out", "time_embedder.linear_2", WEIGHT_BIAS, group="time"),
        *_block("token_refiner.blocks", "token_refiner.refiner_blocks"),
        Rule("token_refiner.final_norm", "token_refiner.final_norm", WEIGHT),
        *_block("blocks", "transformer_blocks"),
        Rule("blocks.#.adaln_proj.linear", "transformer_blocks.#.adaln_proj.linear", WEIGHT_BIAS),
        Rule("final_layer.norm", "norm_out.norm", WEIGHT),
        Rule("final_layer.adaln_proj.linear", "norm_out.linear", WEIGHT_BIAS),
        Rule("final_layer.video_out", "proj_out", WEIGHT_BIAS),
        Rule("final_layer.audio_out", "audio_proj_out", WEIGHT_BIAS),
    ),
    computed={"rope.inv_freq": ".checkpoints.buffers:minimax_h3_frequencies"},
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class. A pruned file (a table for the time embedder) has no counterpart there."""
    head_dim = shapes["blocks.0.attn.q_norm.weight"][0]
    config = {
        "num_attention_heads": shapes["blocks.0.attn.qkv_proj.weight"][0] // (3 * head_dim),
        "attention_head_dim": head_dim,
        "hidden_size": shapes["video_patch_proj.bias"][0],
        "num_layers": depth(shapes, "blocks"),
        "num_refiner_layers": depth(shapes, "token_refiner.blocks"),
        "ffn_dim": shapes["blocks.0.mlp.fc1.weight"][0] // 2,
        "in_channels": shapes["final_layer.video_out.bias"][0] // 4,
        "audio_in_channels": shapes["final_layer.audio_out.bias"][0],
        "text_dim": shapes["condition_proj.weight"][1],
    }
    if "time_embedder.proj_in.weight" in shapes:
        config["freq_dim"] = shapes["time_embedder.proj_in.weight"][1]
        config["time_embed_hidden_dim"] = shapes["time_embedder.proj_in.bias"][0]
        config["time_embed_dim"] = shapes["time_embedder.proj_out.bias"][0]
    if "rope.inv_freq" in shapes:
        config["rope_freq_dim"] = shapes["rope.inv_freq"][0]
    return config


_FILES = ("minimax_h3_fl2va_pruned_int8_convrot.safetensors", "minimax_h3_ref2va_pruned_int8_convrot.safetensors")
_VAES = ("minimax_h3_video_vae_int8_convrot.safetensors", "minimax_h3_audio_vae_fp32.safetensors")

ARCHITECTURE = Architecture(
    name="minimax_h3",
    title="MiniMax-H3",
    license="",
    repositories=("MiniMaxAI/MiniMax-H3",),
    defaults=None,
    signature=(
        "video_patch_proj.bias",
        "audio_patch_proj.bias",
        "condition_proj.weight",
        "blocks.0.attn.qkv_proj.weight",
        "blocks.0.attn.q_norm.weight",
        "blocks.0.mlp.fc1.weight",
        "final_layer.video_out.bias",
        "final_layer.audio_out.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format=None,
    dtypes=("bfloat16", "float32"),
    # ComfyUI builds these in float32, as the published files hold them.
    keep_float32=(
        r"^(?:video|audio)_patch_proj\.",
        r"^time_embedder\.",
        r"^rope\.",
        r"^final_layer\.(?:video|audio)_out\.",
    ),
    quantization=CardPolicy(
        blocks=DIFFUSERS.globs("blocks.*.attn.qkv_proj", "blocks.*.attn.out_proj", "blocks.*.mlp.fc[12]"),
        never=DIFFUSERS.never(
            ("token_refiner.*", "the text passes here once; two blocks of it"),
            ("blocks.*.adaln_proj.linear", "modulation: every token depends on it"),
            ("*_patch_proj", "the first layer: 96 and 32 inputs"),
            ("condition_proj", "the text's only projection"),
            ("time_embedder.*", "the timestep enters here, in one row"),
            ("final_layer.*", "the last layers, straight into the latents, and their modulation"),
        ),
        layout="int8_convrot",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="MiniMaxH3Transformer3DModel",
    files={
        "diffusion_models": _FILES,
        "text_encoders": ("qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",),
        "vae": _VAES,
    },
    downloads={
        **hub("Comfy-Org/MiniMax-H3", *_FILES, folder="diffusion_models"),
        **shared("qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", *_VAES),
    },
)
