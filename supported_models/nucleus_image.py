"""Nucleus-Image: a sparse mixture of experts, a base model."""
# By Nucleus AI, 17B in all, 2B per token.
# Sources: two public copies of the model's transformer configuration, which agree, diffusers' NucleusMoEImagePipeline
# 0.42.1, arXiv 2604.12163. The published scheduler configuration was not seen: see SHIFT.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ..text_encoders.prompt import Prompt
from ._architecture import Architecture, Defaults, KeyMap, Sampling, Shapes
from ._two_way import depth

PATCH_SIZE = 2
MLP_RATIO, MLP_MULTIPLE = 4.0, 128
# Tokens per expert relative to an even share, by block; the first three blocks have no experts.
CAPACITY_FACTORS = (0.0, 0.0, 0.0, 4.0, 4.0)
LATER_CAPACITY_FACTOR = 2.0
# UNVERIFIED. Trainers' configurations and a test that quotes the checkpoint say no shift; two other programs use a
# dynamic one (FLUX.1's: exp(0.5) at 256 image tokens to exp(1.15) at 4096), which core's ModelSamplingFlux gives.
SHIFT = 1.0

SYSTEM_PROMPT = (
    "You are an image generation assistant. Follow the user's prompt literally. Pay careful attention to spatial "
    "layout: objects described as on the left must appear on the left, on the right on the right. Match exact object "
    "counts and assign colors to the correct objects."
)

_BANKS = r"(\.img_mlp\.experts\.(?:gate_up_proj|down_proj))"

# Published files hold a bank as a bare tensor [experts, in, out]. Ours is a layer, as ComfyUI's quantized banks are.
# One map per block that may be the first with experts; the published model's is block 3.
PUBLISHED_LAYOUTS = tuple(
    KeyMap(
        name="diffusers",
        marker=f"transformer_blocks.{first}.img_mlp.experts.gate_up_proj",
        prefixes=("", "transformer."),
        rules=((_BANKS + "$", r"\1.weight"),),
        transposed=(_BANKS + r"\.weight$",),
    )
    for first in (3, 1, 0)
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Constructor arguments; how many tokens an expert takes is the published model's constant."""
    dim, head_dim = shapes["img_in.bias"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    layers = depth(shapes, "transformer_blocks")
    strategy = _strategy([f"transformer_blocks.{i}.img_mlp.gate.weight" in shapes for i in range(layers)])
    if strategy is None or any(key.endswith(".experts.gate_up_proj") for key in shapes):
        return None
    axis = 7 * head_dim // 16  # 56 of 128
    config = {
        "patch_size": PATCH_SIZE,
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["proj_out.weight"][0] // PATCH_SIZE**2,
        "num_layers": layers,
        "attention_head_dim": head_dim,
        "num_attention_heads": shapes["transformer_blocks.0.attn.to_q.weight"][0] // head_dim,
        "num_key_value_heads": shapes["transformer_blocks.0.attn.to_k.weight"][0] // head_dim,
        "joint_attention_dim": shapes["txt_norm.weight"][0],
        "axes_dims_rope": [head_dim - 2 * axis, axis, axis],
        "mlp_ratio": MLP_RATIO,
        "dense_moe_strategy": strategy,
        "capacity_factors": [*CAPACITY_FACTORS, *[LATER_CAPACITY_FACTOR] * layers][:layers],
        "use_sigmoid": False,
        "route_scale": 2.5,
    }
    # Only rows are read: quantized formats pack columns.
    dense = shapes.get("transformer_blocks.0.img_mlp.net.0.proj.weight", (0,))[0] // 2
    if dense and dense != int(dim * MLP_RATIO * 2 / 3) // MLP_MULTIPLE * MLP_MULTIPLE:
        config["mlp_ratio"] = 1.5 * (dense + 0.5) / dim  # rounded down to a multiple of 128 later on
    banks = [key for key in shapes if key.endswith(".img_mlp.experts.gate_up_proj.weight")]
    if banks:
        config["num_experts"], rows, _ = shapes[banks[0]]
        config["moe_intermediate_dim"] = rows // 2
    return config


def _strategy(experts: list[bool]) -> str | None:
    """The reference's name for this choice of blocks with experts; the published model's first where several fit."""
    count = len(experts)
    starts = {
        "leave_first_three_blocks_dense": (3, count),
        "leave_first_three_and_last_block_dense": (3, count - 1),
        "leave_first_block_dense": (1, count),
        "all_moe": (0, count),
        "all_dense": (count, count),
    }
    return next((name for name, (a, b) in starts.items() if experts == [a <= i < b for i in range(count)]), None)


_BLOCK = "transformer_blocks.*."

ARCHITECTURE = Architecture(
    name="nucleus_image",
    title="Nucleus-Image",
    license="Apache-2.0",
    repositories=("NucleusAI/Nucleus-Image", "NucleusAI/NucleusMoE-Image"),
    # "simple" spaces the times evenly from 1 to 1/50, which is the published schedule.
    defaults=Defaults(steps=50, cfg=4.0, sampler="euler", scheduler="simple", width=1024, height=1024),
    signature=(
        "img_in.weight",
        "img_in.bias",
        "txt_norm.weight",
        "time_text_embed.norm.weight",
        "transformer_blocks.0.encoder_proj.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "transformer_blocks.0.attn.to_q.weight",
        "transformer_blocks.0.attn.to_k.weight",
        "proj_out.weight",
    ),
    config_from_shapes=config_from_shapes,
    module=".ldm.nucleus.model:NucleusMoEImageTransformer2DModel",
    sampling=Sampling(prediction="-velocity", shift=SHIFT, multiplier=1.0),
    latent_format="wan21",
    text_encoders=("qwen3_vl",),
    text_encoder_width=4096,
    autoencoder="wan21",
    # Nothing is cut off: the model attends to the template too. hidden_states[-8] of the 36 layers, no final norm.
    prompt=Prompt(
        template=(
            f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n{{prompt}}<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        max_length=1024,
        layers=(-8,),
    ),
    core_mistake="qwen_image",  # both have a txt_norm
    # float16 needs its outputs clipped in every block (they are) and is unverified.
    dtypes=("bfloat16", "float32"),
    # ComfyUI's estimate for FLUX (3.1 at 3072 channels) by the width and what the experts hold; not measured.
    memory_usage_factor=3.0,
    quantization=CardPolicy(
        blocks=(
            _BLOCK + "attn.to_[qkv]",
            _BLOCK + "attn.add_[kv]_proj",
            _BLOCK + "attn.to_out.0",
            _BLOCK + "img_mlp.net.*",
            _BLOCK + "img_mlp.shared_expert.net.*",
        ),
        banks=(_BLOCK + "img_mlp.experts.gate_up_proj", _BLOCK + "img_mlp.experts.down_proj"),
        never=(
            (_BLOCK + "img_mlp.gate", "the router: an error changes which tokens an expert takes"),
            (_BLOCK + "img_mod.1", "modulation: every token depends on it"),
            (_BLOCK + "encoder_proj", "each block's only view of the text"),
            ("time_text_embed.*", "the timestep enters here, in one row"),
            ("img_in", "the first layer: 64 inputs"),
            ("norm_out.linear", "modulation of the output"),
            ("proj_out", "the last layer, straight into the latent"),
        ),
        # 1344 input features are 21 * 64: a rotation over 256 of them does not exist. Over 64 an int8 layer's output is
        # 1.8 to 5 times closer than without, a w4a4 layer's 1.1 to 1.4 times closer than over 16 (measured by
        # benchmarks/nucleus_rotation.py). ComfyUI 0.33 forgets that an int8 bank is rotated, and has no bank in
        # asym_w4a8_int8.
        alternatives=(
            (_BLOCK + "img_mlp.experts.*", "int8_tensorwise", "int8_tensorwise:scale=row"),
            (_BLOCK + "img_mlp.experts.*", "asym_w4a8_int8", "int8_tensorwise:scale=row"),
            (_BLOCK + "img_mlp.experts.down_proj", "convrot_w4a4", "convrot_w4a4:convrot=64"),
            *(
                (_BLOCK + "img_mlp.shared_expert.net.2", name, f"{name}:convrot=64")
                for name in ("int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8")
            ),
        ),
    ),
    layouts=PUBLISHED_LAYOUTS,
    files={
        "diffusion_models": ("nucleus_image_bf16.safetensors",),
        "text_encoders": ("qwen3vl_8b_bf16.safetensors", "qwen3vl_8b_fp8_scaled.safetensors"),
        "vae": ("qwen_image_vae.safetensors", "wan_2.1_vae.safetensors"),
    },
)
