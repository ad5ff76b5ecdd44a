"""Z-Image and its turbo kind. ComfyUI's core loads them."""
# By Tongyi-MAI, 6B.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class, single-file converter), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._two_way import PARAMETER, WEIGHT, WEIGHT_BIAS, Rule, TwoWayMap, depth

PATCH_SIZE = 2


def _block(stack: str, modulated: bool) -> tuple[Rule, ...]:
    names = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    names += ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
    rules = [
        Rule(f"{stack}.#.attention.qkv", tuple(f"{stack}.#.attention.to_{x}" for x in "qkv"), WEIGHT),
        Rule(f"{stack}.#.attention.out", f"{stack}.#.attention.to_out.0", WEIGHT),
        Rule(f"{stack}.#.attention.q_norm", f"{stack}.#.attention.norm_q", WEIGHT),
        Rule(f"{stack}.#.attention.k_norm", f"{stack}.#.attention.norm_k", WEIGHT),
        *(Rule(f"{stack}.#.{name}", f"{stack}.#.{name}", WEIGHT) for name in names),
    ]
    if modulated:
        rules.append(Rule(f"{stack}.#.adaLN_modulation.0", f"{stack}.#.adaLN_modulation.0", WEIGHT_BIAS))
    return tuple(rules)


DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker="all_x_embedder.2-1.weight",
    prefixes=("", "transformer."),
    rules=(
        Rule("x_pad_token", "x_pad_token", PARAMETER),
        Rule("cap_pad_token", "cap_pad_token", PARAMETER),
        Rule("x_embedder", "all_x_embedder.2-1", WEIGHT_BIAS),
        Rule("t_embedder.mlp.0", "t_embedder.mlp.0", WEIGHT_BIAS),
        Rule("t_embedder.mlp.2", "t_embedder.mlp.2", WEIGHT_BIAS),
        Rule("cap_embedder.0", "cap_embedder.0", WEIGHT),
        Rule("cap_embedder.1", "cap_embedder.1", WEIGHT_BIAS),
        Rule("final_layer.linear", "all_final_layer.2-1.linear", WEIGHT_BIAS),
        Rule("final_layer.adaLN_modulation.1", "all_final_layer.2-1.adaLN_modulation.1", WEIGHT_BIAS),
        *_block("layers", modulated=True),
        *_block("noise_refiner", modulated=True),
        *_block("context_refiner", modulated=False),
    ),
    ignored=(r"^norm_final\.weight$",),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class. The pixel and the image-conditioned variants are other models."""
    if "dec_net.cond_embed.weight" in shapes or "siglip_embedder.0.weight" in shapes:
        return None
    dim, head_dim = shapes["x_embedder.bias"][0], shapes["layers.0.attention.q_norm.weight"][0]
    heads = dim // head_dim
    return {
        "in_channels": shapes["final_layer.linear.bias"][0] // PATCH_SIZE**2,
        "dim": dim,
        "n_layers": depth(shapes, "layers"),
        "n_refiner_layers": depth(shapes, "noise_refiner"),
        "n_heads": heads,
        "n_kv_heads": (shapes["layers.0.attention.qkv.weight"][0] // head_dim - heads) // 2,
        "cap_feat_dim": shapes["cap_embedder.0.weight"][0],
    }


_PARTS = ("attention.qkv", "attention.out", "feed_forward.w[123]")

ARCHITECTURE = Architecture(
    name="z_image",
    title="Z-Image",
    license="",
    repositories=("Tongyi-MAI/Z-Image-Turbo", "Tongyi-MAI/Z-Image"),
    defaults=None,
    signature=(
        "x_embedder.bias",
        "cap_embedder.1.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.adaLN_modulation.0.weight",
        "noise_refiner.0.attention.k_norm.weight",
        "final_layer.linear.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format="flux",
    text_encoders=(),
    autoencoder="kl_flux",
    dtypes=("bfloat16", "float32"),
    quantization=CardPolicy(
        # All 202 matrices inside the blocks, and nothing else: what the published int8 ConvRot file holds.
        blocks=DIFFUSERS.globs(
            *(f"{stack}.*.{part}" for stack in ("layers", "noise_refiner", "context_refiner") for part in _PARTS),
            # the context refiner is not modulated
            *(f"{stack}.*.adaLN_modulation.0" for stack in ("layers", "noise_refiner")),
        ),
        never=DIFFUSERS.never(
            ("x_embedder", "the first layer: 64 inputs"),
            ("cap_embedder.*", "the text's only projection"),
            ("t_embedder.*", "the timestep enters here, in one row"),
            ("final_layer.*", "the last layer, straight into the latent, and its modulation"),
        ),
        layout="int8_convrot",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="ZImageTransformer2DModel",
    files={
        "diffusion_models": (
            "z_image_turbo_int8_convrot.safetensors",
            "z_image_turbo_bf16.safetensors",
            "z_image_int8_convrot.safetensors",
            "z_image_bf16.safetensors",
        ),
        "text_encoders": ("qwen_3_4b.safetensors",),
        "vae": ("ae.safetensors",),
    },
    downloads={
        **hub("Comfy-Org/z_image_turbo", "z_image_turbo_int8_convrot.safetensors", "z_image_turbo_bf16.safetensors"),
        **hub("Comfy-Org/z_image", "z_image_int8_convrot.safetensors", "z_image_bf16.safetensors"),
        **shared("qwen_3_4b.safetensors", "ae.safetensors"),
    },
)
