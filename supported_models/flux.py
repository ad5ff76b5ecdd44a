"""FLUX.1 and all that shares its keys. ComfyUI's core loads it."""
# FLUX.1 dev and schnell, Fill, Canny, Depth, Kontext, Krea; by Black Forest Labs, 12B.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class, single-file converter), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._mmdit import BLOCKS, NORM_SPELLING, double_block, split_single_block
from ._two_way import WEIGHT_BIAS, Rule, TwoWayMap, depth

DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker="time_text_embed.text_embedder.linear_1.weight",
    prefixes=("", "transformer."),
    rules=(
        Rule("img_in", "x_embedder", WEIGHT_BIAS),
        Rule("txt_in", "context_embedder", WEIGHT_BIAS),
        Rule("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1", WEIGHT_BIAS),
        Rule("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2", WEIGHT_BIAS),
        Rule("vector_in.in_layer", "time_text_embed.text_embedder.linear_1", WEIGHT_BIAS),
        Rule("vector_in.out_layer", "time_text_embed.text_embedder.linear_2", WEIGHT_BIAS),
        # schnell has no guidance
        Rule("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1", WEIGHT_BIAS, group="guidance"),
        Rule("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2", WEIGHT_BIAS, group="guidance"),
        Rule("double_blocks.#.img_mod.lin", "transformer_blocks.#.norm1.linear", WEIGHT_BIAS),
        Rule("double_blocks.#.txt_mod.lin", "transformer_blocks.#.norm1_context.linear", WEIGHT_BIAS),
        *double_block(WEIGHT_BIAS, ("net.0.proj", "net.2")),
        Rule("single_blocks.#.modulation.lin", "single_transformer_blocks.#.norm.linear", WEIGHT_BIAS),
        *split_single_block(WEIGHT_BIAS),
        Rule("final_layer.linear", "proj_out", WEIGHT_BIAS),
        # ours is (shift, scale), diffusers' (scale, shift)
        Rule("final_layer.adaLN_modulation.1", "norm_out.linear", WEIGHT_BIAS, swapped=True),
    ),
    spellings=(NORM_SPELLING,),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class."""
    if "distilled_guidance_layer.in_proj.weight" in shapes or "double_blocks.0.img_mlp.gate_proj.weight" in shapes:
        return None
    width = shapes["img_in.bias"][0]
    norm = next(shapes[f"single_blocks.0.norm.query_norm.{name}"] for name in ("scale", "weight") if
                f"single_blocks.0.norm.query_norm.{name}" in shapes)  # fmt: skip
    channels, out_channels = shapes["img_in.weight"][1], shapes["final_layer.linear.bias"][0]
    return {
        "in_channels": channels,
        "out_channels": None if out_channels == channels else out_channels,
        "num_layers": depth(shapes, "double_blocks"),
        "num_single_layers": depth(shapes, "single_blocks"),
        "attention_head_dim": norm[0],
        "num_attention_heads": width // norm[0],
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }


_DEV = ("flux1-dev.safetensors", "flux1-schnell.safetensors", "flux1-dev-fp8.safetensors")
_KONTEXT, _KREA = "flux1-dev-kontext_fp8_scaled.safetensors", "flux1-krea-dev_fp8_scaled.safetensors"
_TOOLS = ("flux1-fill-dev.safetensors", "flux1-canny-dev.safetensors")

ARCHITECTURE = Architecture(
    name="flux",
    title="FLUX.1",
    license="",
    repositories=("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"),
    defaults=None,
    signature=(
        "img_in.weight",
        "img_in.bias",
        "txt_in.weight",
        "vector_in.in_layer.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "double_blocks.0.img_mod.lin.weight",
        "single_blocks.0.modulation.lin.weight",
        "single_blocks.0.linear1.weight",
        "final_layer.linear.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format="flux",
    autoencoder="kl_flux",
    dtypes=("bfloat16", "float16", "float32"),
    quantization=CardPolicy(
        blocks=DIFFUSERS.globs(*BLOCKS),
        never=DIFFUSERS.never(
            ("*_blocks.*_mod.lin", "modulation: every token depends on it"),
            ("single_blocks.*.modulation.lin", "modulation: every token depends on it"),
            ("img_in", "the first layer: 64 inputs"),
            ("txt_in", "the text's only projection"),
            ("time_in.*", "the timestep enters here, in one row"),
            ("vector_in.*", "the pooled text enters here, in one row"),
            ("guidance_in.*", "the guidance enters here, in one row"),
            ("final_layer.*", "the last layer, straight into the latent, and its modulation"),
        ),
        layout="float8_e4m3fn",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="FluxTransformer2DModel",
    files={
        "diffusion_models": (*_DEV, _KONTEXT, _KREA, *_TOOLS),
        "checkpoints": ("flux1-dev-fp8.safetensors", "flux1-schnell-fp8.safetensors"),
        "text_encoders": ("t5xxl_fp16.safetensors", "t5xxl_fp8_e4m3fn_scaled.safetensors", "clip_l.safetensors"),
        "vae": ("ae.safetensors",),
    },
    downloads={
        **hub("Comfy-Org/flux1-dev", "flux1-dev.safetensors", "flux1-dev-fp8.safetensors", folder=""),
        **hub("Comfy-Org/flux1-schnell", "flux1-schnell.safetensors", "flux1-schnell-fp8.safetensors", folder=""),
        **hub("Comfy-Org/flux1-kontext-dev_ComfyUI", _KONTEXT),
        **hub("Comfy-Org/FLUX.1-Krea-dev_ComfyUI", _KREA),
        **hub("Comfy-Org/flux1-dev", *_TOOLS),
        **shared(
            "t5xxl_fp16.safetensors", "t5xxl_fp8_e4m3fn_scaled.safetensors", "clip_l.safetensors", "ae.safetensors"
        ),
    },
)
