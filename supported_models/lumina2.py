"""Lumina-Image 2.0. ComfyUI's core loads it."""
# By Alpha-VLLM, 2.6B.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class, single-file converter),
# the file names of comfyui-workflow-templates-json 0.1.123, which has no file of the diffusion model alone.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._two_way import WEIGHT, WEIGHT_BIAS, First, Rule, TwoWayMap, depth

PATCH_SIZE = 2


def _block(stack: str, modulated: bool) -> tuple[Rule, ...]:
    ours = f"{stack}.#."
    rules = [
        Rule(
            f"{ours}attention.qkv",
            tuple(f"{ours}attn.to_{x}" for x in "qkv"),
            WEIGHT,
            # Fewer heads for k and v than for q: q is as wide as the output projection's input.
            first=First(1, f"{ours}attention.out.weight", 1),
        ),
        Rule(f"{ours}attention.out", f"{ours}attn.to_out.0", WEIGHT),
        Rule(f"{ours}attention.q_norm", f"{ours}attn.norm_q", WEIGHT),
        Rule(f"{ours}attention.k_norm", f"{ours}attn.norm_k", WEIGHT),
        *(Rule(f"{ours}feed_forward.w{i}", f"{ours}feed_forward.linear_{i}", WEIGHT) for i in (1, 2, 3)),
        Rule(f"{ours}attention_norm1", f"{ours}norm1.norm" if modulated else f"{ours}norm1", WEIGHT),
        Rule(f"{ours}attention_norm2", f"{ours}norm2", WEIGHT),
        Rule(f"{ours}ffn_norm1", f"{ours}ffn_norm1", WEIGHT),
        Rule(f"{ours}ffn_norm2", f"{ours}ffn_norm2", WEIGHT),
    ]
    if modulated:
        rules.append(Rule(f"{ours}adaLN_modulation.1", f"{ours}norm1.linear", WEIGHT_BIAS))
    return tuple(rules)


# The one model of this key set that the templates name: NetaYume, a fine-tune.
_FILES = ("NetaYumev35_pretrained_all_in_one.safetensors",)

DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker="time_caption_embed.caption_embedder.1.weight",
    prefixes=("", "transformer."),
    rules=(
        Rule("x_embedder", "x_embedder", WEIGHT_BIAS),
        Rule("t_embedder.mlp.0", "time_caption_embed.timestep_embedder.linear_1", WEIGHT_BIAS),
        Rule("t_embedder.mlp.2", "time_caption_embed.timestep_embedder.linear_2", WEIGHT_BIAS),
        Rule("cap_embedder.0", "time_caption_embed.caption_embedder.0", WEIGHT),
        Rule("cap_embedder.1", "time_caption_embed.caption_embedder.1", WEIGHT_BIAS),
        Rule("final_layer.adaLN_modulation.1", "norm_out.linear_1", WEIGHT_BIAS),
        Rule("final_layer.linear", "norm_out.linear_2", WEIGHT_BIAS),
        *_block("layers", modulated=True),
        *_block("noise_refiner", modulated=True),
        *_block("context_refiner", modulated=False),
    ),
    # The publisher's file carries a norm that its model does not use.
    ignored=(r"^norm_final\.weight$",),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class. NewBie has the same blocks and a second text encoder, OmniGen2 reference pictures:
    other models."""
    if "clip_text_pooled_proj.0.weight" in shapes or "ref_image_patch_embedder.weight" in shapes:
        return None
    width, head_dim = shapes["x_embedder.bias"][0], shapes["layers.0.attention.q_norm.weight"][0]
    heads = width // head_dim
    return {
        "in_channels": shapes["final_layer.linear.bias"][0] // PATCH_SIZE**2,
        "hidden_size": width,
        "num_layers": depth(shapes, "layers"),
        "num_refiner_layers": depth(shapes, "noise_refiner"),
        "num_attention_heads": heads,
        "num_kv_heads": (shapes["layers.0.attention.qkv.weight"][0] // head_dim - heads) // 2,
        "cap_feat_dim": shapes["cap_embedder.0.weight"][0],
    }


_PARTS = ("attention.qkv", "attention.out", "feed_forward.w[123]")

ARCHITECTURE = Architecture(
    name="lumina2",
    title="Lumina-Image 2.0",
    license="",
    repositories=("Alpha-VLLM/Lumina-Image-2.0",),
    defaults=None,
    signature=(
        "x_embedder.bias",
        "cap_embedder.1.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.adaLN_modulation.1.weight",
        "noise_refiner.0.attention.k_norm.weight",
        "final_layer.linear.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format="flux",
    autoencoder="kl_flux",
    dtypes=("bfloat16", "float32"),
    quantization=CardPolicy(
        blocks=DIFFUSERS.globs(
            *(f"{stack}.*.{part}" for stack in ("layers", "noise_refiner", "context_refiner") for part in _PARTS)
        ),
        never=DIFFUSERS.never(
            ("*.adaLN_modulation.1", "modulation: every token depends on it"),
            ("x_embedder", "the first layer: 64 inputs"),
            ("cap_embedder.*", "the text's only projection"),
            ("t_embedder.*", "the timestep enters here, in one row"),
            ("final_layer.*", "the last layer, straight into the latent, and its modulation"),
        ),
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="Lumina2Transformer2DModel",
    files={"checkpoints": _FILES, "vae": ("ae.safetensors",)},
    downloads={**hub("duongve/NetaYume-Lumina-Image-2.0", *_FILES, folder=""), **shared("ae.safetensors")},
)
