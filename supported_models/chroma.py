"""Chroma, made from FLUX.1 schnell. ComfyUI's core loads it."""
# By lodestones, 8.9B.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class, single-file converter), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._mmdit import BLOCKS, NORM_SPELLING, double_block, split_single_block
from ._two_way import PARAMETER, WEIGHT_BIAS, Rule, TwoWayMap, depth

_GUIDANCE = "distilled_guidance_layer."

DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker=_GUIDANCE + "layers.0.linear_1.weight",
    prefixes=("", "transformer."),
    rules=(
        Rule("img_in", "x_embedder", WEIGHT_BIAS),
        Rule("txt_in", "context_embedder", WEIGHT_BIAS),
        Rule(_GUIDANCE + "in_proj", _GUIDANCE + "in_proj", WEIGHT_BIAS),
        Rule(_GUIDANCE + "out_proj", _GUIDANCE + "out_proj", WEIGHT_BIAS),
        Rule(_GUIDANCE + "layers.#.in_layer", _GUIDANCE + "layers.#.linear_1", WEIGHT_BIAS),
        Rule(_GUIDANCE + "layers.#.out_layer", _GUIDANCE + "layers.#.linear_2", WEIGHT_BIAS),
        Rule(_GUIDANCE + "norms.#.scale", _GUIDANCE + "norms.#.weight", PARAMETER),
        *double_block(WEIGHT_BIAS, ("net.0.proj", "net.2")),
        *split_single_block(WEIGHT_BIAS),
        # no modulation of the output: the guidance layers make it
        Rule("final_layer.linear", "proj_out", WEIGHT_BIAS),
    ),
    spellings=(NORM_SPELLING, (r"^(distilled_guidance_layer\.norms\.\d+)\.weight$", r"\1.scale")),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class. Chroma Radiance works on pixels and is another model."""
    if any(key.startswith("nerf_") for key in shapes):
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
        "approximator_num_channels": shapes[_GUIDANCE + "in_proj.weight"][1],
        "approximator_hidden_dim": shapes[_GUIDANCE + "in_proj.bias"][0],
        "approximator_layers": depth(shapes, _GUIDANCE + "layers"),
    }


ARCHITECTURE = Architecture(
    name="chroma",
    title="Chroma",
    license="",
    repositories=("lodestones/Chroma1-HD",),
    defaults=None,
    signature=(
        "img_in.weight",
        "img_in.bias",
        "txt_in.weight",
        _GUIDANCE + "in_proj.weight",
        _GUIDANCE + "layers.0.in_layer.weight",
        "double_blocks.0.img_attn.qkv.weight",
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
            (_GUIDANCE + "*", "it makes the modulation of every block"),
            ("img_in", "the first layer: 64 inputs"),
            ("txt_in", "the text's only projection"),
            ("final_layer.linear", "the last layer, straight into the latent"),
        ),
        layout="float8_e4m3fn",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="ChromaTransformer2DModel",
    files={
        "diffusion_models": ("Chroma1-HD-fp8mixed.safetensors",),
        "text_encoders": ("t5xxl_fp8_e4m3fn_scaled.safetensors", "t5xxl_fp16.safetensors"),
        "vae": ("ae.safetensors",),
    },
    downloads={
        **hub("Comfy-Org/Chroma1-HD_repackaged", "Chroma1-HD-fp8mixed.safetensors"),
        **shared("t5xxl_fp8_e4m3fn_scaled.safetensors", "t5xxl_fp16.safetensors", "ae.safetensors"),
    },
)
