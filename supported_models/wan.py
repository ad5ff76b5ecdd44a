"""Wan 2.1 and 2.2: text to video, image to video, first and last frame. ComfyUI's core loads them.

The largest one of Wan 2.2 is two models of the same shape, one for high and one for low noise; their files are
told by name alone. Relatives with keys of their own are no part of this card.
"""
# 1.3B, 5B, 14B. The pair is Wan 2.2's 14B; the relatives are VACE, Camera, Animate, S2V and others.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class, single-file converter), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._two_way import PARAMETER, WEIGHT, WEIGHT_BIAS, Rule, TwoWayMap, depth

HEAD_DIM = 128
_EMBED, _IMAGE = "condition_embedder.", "condition_embedder.image_embedder."


def _attention(ours: str, theirs: str) -> tuple[Rule, ...]:
    mine, other = f"blocks.#.{ours}.", f"blocks.#.{theirs}."
    return (
        *(Rule(f"{mine}{x}", f"{other}to_{x}", WEIGHT_BIAS) for x in "qkv"),
        Rule(mine + "o", other + "to_out.0", WEIGHT_BIAS),
        Rule(mine + "norm_q", other + "norm_q", WEIGHT),
        Rule(mine + "norm_k", other + "norm_k", WEIGHT),
    )


DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker=_EMBED + "time_embedder.linear_1.weight",
    prefixes=("", "transformer.", "transformer_2."),
    rules=(
        Rule("patch_embedding", "patch_embedding", WEIGHT_BIAS),
        Rule("text_embedding.0", _EMBED + "text_embedder.linear_1", WEIGHT_BIAS),
        Rule("text_embedding.2", _EMBED + "text_embedder.linear_2", WEIGHT_BIAS),
        Rule("time_embedding.0", _EMBED + "time_embedder.linear_1", WEIGHT_BIAS),
        Rule("time_embedding.2", _EMBED + "time_embedder.linear_2", WEIGHT_BIAS),
        Rule("time_projection.1", _EMBED + "time_proj", WEIGHT_BIAS),
        Rule("head.modulation", "scale_shift_table", PARAMETER),
        Rule("head.head", "proj_out", WEIGHT_BIAS),
        Rule("blocks.#.modulation", "blocks.#.scale_shift_table", PARAMETER),
        *_attention("self_attn", "attn1"),
        *_attention("cross_attn", "attn2"),
        # the norm before the cross attention: the third in the publisher's code, the second in diffusers'
        Rule("blocks.#.norm3", "blocks.#.norm2", WEIGHT_BIAS),
        Rule("blocks.#.ffn.0", "blocks.#.ffn.net.0.proj", WEIGHT_BIAS),
        Rule("blocks.#.ffn.2", "blocks.#.ffn.net.2", WEIGHT_BIAS),
        # Wan 2.1 image to video
        Rule("blocks.#.cross_attn.k_img", "blocks.#.attn2.add_k_proj", WEIGHT_BIAS, group="image"),
        Rule("blocks.#.cross_attn.v_img", "blocks.#.attn2.add_v_proj", WEIGHT_BIAS, group="image"),
        Rule("blocks.#.cross_attn.norm_k_img", "blocks.#.attn2.norm_added_k", WEIGHT, group="image"),
        Rule("img_emb.proj.0", _IMAGE + "norm1", WEIGHT_BIAS, group="image"),
        Rule("img_emb.proj.1", _IMAGE + "ff.net.0.proj", WEIGHT_BIAS, group="image"),
        Rule("img_emb.proj.3", _IMAGE + "ff.net.2", WEIGHT_BIAS, group="image"),
        Rule("img_emb.proj.4", _IMAGE + "norm2", WEIGHT_BIAS, group="image"),
        # first and last frame
        Rule("img_emb.emb_pos", _IMAGE + "pos_embed", PARAMETER, group="two frames"),
    ),
)

# Keys that only other models of the family have, with or without a number.
_OTHERS = ("vace_", "control_adapter.", "casual_audio_encoder.", "audio_proj.", "face_adapter.", "ref_conv.",
           "patch_embedding_", "motion_encoder.", "pose_patch_embedding.")  # fmt: skip


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class."""
    if any(key.startswith(_OTHERS) for key in shapes):
        return None
    width, patch = shapes["patch_embedding.bias"][0], shapes["patch_embedding.weight"]
    image = "img_emb.proj.1.weight" in shapes
    return {
        "patch_size": list(patch[2:]),
        "num_attention_heads": width // HEAD_DIM,
        "attention_head_dim": HEAD_DIM,
        "in_channels": patch[1],
        "out_channels": shapes["head.head.bias"][0] // (patch[2] * patch[3] * patch[4]),
        "text_dim": shapes["text_embedding.0.weight"][1],
        "freq_dim": shapes["time_embedding.0.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.0.bias"][0],
        "num_layers": depth(shapes, "blocks"),
        "image_dim": shapes["img_emb.proj.0.weight"][0] if image else None,
        "added_kv_proj_dim": width if image else None,
        "pos_embed_seq_len": shapes["img_emb.emb_pos"][1] if "img_emb.emb_pos" in shapes else None,
    }


_WAN21 = (
    "wan2.1_t2v_14B_fp8_scaled.safetensors",
    "wan2.1_t2v_1.3B_fp16.safetensors",
    "wan2.1_i2v_480p_14B_fp16.safetensors",
    "wan2.1_flf2v_720p_14B_fp16.safetensors",
)
_WAN22 = (
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
    "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors",
    "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors",
    "wan2.2_ti2v_5B_fp16.safetensors",
)

ARCHITECTURE = Architecture(
    name="wan",
    title="Wan 2.1 / 2.2",
    license="",
    repositories=("Wan-AI/Wan2.1-T2V-14B", "Wan-AI/Wan2.2-T2V-A14B", "Wan-AI/Wan2.2-TI2V-5B"),
    defaults=None,
    signature=(
        "patch_embedding.weight",
        "patch_embedding.bias",
        "head.modulation",
        "head.head.bias",
        "text_embedding.0.weight",
        "time_embedding.0.weight",
        "blocks.0.self_attn.q.weight",
        "blocks.0.cross_attn.q.weight",
        "blocks.0.ffn.0.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format=None,
    dtypes=("float16", "bfloat16", "float32"),
    # What diffusers keeps in float32.
    keep_float32=(r"^time_embedding\.", r"modulation$", r"\.norm3\."),
    quantization=CardPolicy(
        blocks=DIFFUSERS.globs(
            "blocks.*.self_attn.[qkvo]",
            "blocks.*.cross_attn.[qkvo]",
            "blocks.*.cross_attn.[kv]_img",
            "blocks.*.ffn.[02]",
        ),
        never=DIFFUSERS.never(
            ("patch_embedding", "the first layer, a convolution"),
            ("text_embedding.*", "the text's only projection"),
            ("time_*", "the timestep enters here, and it makes the modulation of every block"),
            ("img_emb.*", "the picture's only projection"),
            ("head.head", "the last layer, straight into the latent"),
        ),
        layout="float8_e4m3fn",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="WanTransformer3DModel",
    files={
        "diffusion_models": (*_WAN22, *_WAN21),
        "text_encoders": ("umt5_xxl_fp8_e4m3fn_scaled.safetensors",),
        "vae": ("wan_2.1_vae.safetensors", "wan2.2_vae.safetensors"),
    },
    downloads={
        **hub("Comfy-Org/Wan_2.1_ComfyUI_repackaged", *_WAN21),
        **hub("Comfy-Org/Wan_2.2_ComfyUI_Repackaged", *_WAN22),
        **shared("umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors", "wan2.2_vae.safetensors"),
    },
)
