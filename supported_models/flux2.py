"""FLUX.2, large and small. ComfyUI's core loads it."""
# FLUX.2 dev (32B) and klein (4B, 9B); by Black Forest Labs.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class, single-file converter), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._mmdit import BLOCKS, NORM_SPELLING, SINGLE_NORMS, double_block
from ._two_way import WEIGHT, Rule, TwoWayMap, depth

_TIME = "time_guidance_embed."

DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker=_TIME + "timestep_embedder.linear_1.weight",
    prefixes=("", "transformer."),
    rules=(
        Rule("img_in", "x_embedder", WEIGHT),
        Rule("txt_in", "context_embedder", WEIGHT),
        Rule("time_in.in_layer", _TIME + "timestep_embedder.linear_1", WEIGHT),
        Rule("time_in.out_layer", _TIME + "timestep_embedder.linear_2", WEIGHT),
        # klein has no guidance
        Rule("guidance_in.in_layer", _TIME + "guidance_embedder.linear_1", WEIGHT, group="guidance"),
        Rule("guidance_in.out_layer", _TIME + "guidance_embedder.linear_2", WEIGHT, group="guidance"),
        *(
            Rule(f"{name}.lin", f"{name}.linear", WEIGHT)
            for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
        ),
        *double_block(WEIGHT, ("linear_in", "linear_out")),
        # q, k, v and the feed-forward stay one matrix in diffusers too
        Rule("single_blocks.#.linear1", "single_transformer_blocks.#.attn.to_qkv_mlp_proj", WEIGHT),
        Rule("single_blocks.#.linear2", "single_transformer_blocks.#.attn.to_out", WEIGHT),
        *SINGLE_NORMS,
        Rule("final_layer.linear", "proj_out", WEIGHT),
        # ours is (shift, scale), diffusers' (scale, shift)
        Rule("final_layer.adaLN_modulation.1", "norm_out.linear", WEIGHT, swapped=True),
    ),
    spellings=(NORM_SPELLING,),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class."""
    width = shapes["img_in.weight"][0]
    norm = next(shapes[f"single_blocks.0.norm.query_norm.{name}"] for name in ("scale", "weight") if
                f"single_blocks.0.norm.query_norm.{name}" in shapes)  # fmt: skip
    channels, out_channels = shapes["img_in.weight"][1], shapes["final_layer.linear.weight"][0]
    # The gated feed-forward's first layer has two halves.
    mlp_ratio = shapes["double_blocks.0.img_mlp.0.weight"][0] / 2 / width
    return {
        "in_channels": channels,
        "out_channels": None if out_channels == channels else out_channels,
        "num_layers": depth(shapes, "double_blocks"),
        "num_single_layers": depth(shapes, "single_blocks"),
        "attention_head_dim": norm[0],
        "num_attention_heads": width // norm[0],
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "mlp_ratio": mlp_ratio,
        "guidance_embeds": "guidance_in.in_layer.weight" in shapes,
    }


_KLEIN = ("flux-2-klein-4b.safetensors", "flux-2-klein-base-4b.safetensors")
_KLEIN_FP8 = ("klein-4b", "klein-9b", "klein-base-4b", "klein-base-9b")

ARCHITECTURE = Architecture(
    name="flux2",
    title="FLUX.2",
    license="",
    repositories=("black-forest-labs/FLUX.2-dev", "black-forest-labs/FLUX.2-klein-4B"),
    defaults=None,
    signature=(
        "img_in.weight",
        "txt_in.weight",
        "double_stream_modulation_img.lin.weight",
        "double_blocks.0.img_attn.qkv.weight",
        "single_blocks.0.linear1.weight",
        "final_layer.linear.weight",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format=None,
    dtypes=("bfloat16", "float16", "float32"),
    quantization=CardPolicy(
        blocks=DIFFUSERS.globs(*BLOCKS),
        never=DIFFUSERS.never(
            ("*_stream_modulation*.lin", "modulation, shared by all blocks"),
            ("img_in", "the first layer: 128 inputs"),
            ("txt_in", "the text's only projection"),
            ("time_in.*", "the timestep enters here, in one row"),
            ("guidance_in.*", "the guidance enters here, in one row"),
            ("final_layer.*", "the last layer, straight into the latent, and its modulation"),
        ),
        layout="float8_e4m3fn",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="Flux2Transformer2DModel",
    files={
        "diffusion_models": (
            "flux2_dev_fp8mixed.safetensors",
            *(f"flux-2-{name}-fp8.safetensors" for name in _KLEIN_FP8),
            *_KLEIN,
        ),
        "text_encoders": (
            "mistral_3_small_flux2_fp8.safetensors",
            "mistral_3_small_flux2_bf16.safetensors",
            "qwen_3_4b.safetensors",
            "qwen_3_8b_fp8mixed.safetensors",
        ),
        "vae": ("flux2-vae.safetensors",),
    },
    downloads={
        **hub("Comfy-Org/flux2-dev", "flux2_dev_fp8mixed.safetensors"),
        **hub("Comfy-Org/flux2-klein", *_KLEIN),
        **{
            key: value
            for name in _KLEIN_FP8
            for key, value in hub(
                f"black-forest-labs/FLUX.2-{name}-fp8", f"flux-2-{name}-fp8.safetensors", folder=""
            ).items()
        },
        **shared(
            "flux2-vae.safetensors",
            "mistral_3_small_flux2_bf16.safetensors",
            "mistral_3_small_flux2_fp8.safetensors",
            "qwen_3_4b.safetensors",
            "qwen_3_8b_fp8mixed.safetensors",
        ),
    },
)
