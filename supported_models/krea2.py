"""Krea 2. ComfyUI's core loads it."""
# By Krea, 12.8B.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class, single-file converter), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._two_way import PARAMETER, WEIGHT, WEIGHT_BIAS, Rule, TwoWayMap, depth


def _block(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        *(Rule(f"{ours}.#.attn.w{x}", f"{theirs}.#.attn.to_{x}", WEIGHT) for x in "qkv"),
        Rule(f"{ours}.#.attn.wo", f"{theirs}.#.attn.to_out.0", WEIGHT),
        Rule(f"{ours}.#.attn.gate", f"{theirs}.#.attn.to_gate", WEIGHT),
        *(Rule(f"{ours}.#.mlp.{name}", f"{theirs}.#.ff.{name}", WEIGHT) for name in ("gate", "up", "down")),
        # this model's own code calls every norm's weight "scale"
        Rule(f"{ours}.#.attn.qknorm.qnorm.scale", f"{theirs}.#.attn.norm_q.weight", PARAMETER),
        Rule(f"{ours}.#.attn.qknorm.knorm.scale", f"{theirs}.#.attn.norm_k.weight", PARAMETER),
        Rule(f"{ours}.#.prenorm.scale", f"{theirs}.#.norm1.weight", PARAMETER),
        Rule(f"{ours}.#.postnorm.scale", f"{theirs}.#.norm2.weight", PARAMETER),
    )


DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker="transformer_blocks.0.scale_shift_table",
    prefixes=("", "transformer."),
    rules=(
        Rule("first", "img_in", WEIGHT_BIAS),
        Rule("tmlp.0", "time_embed.linear_1", WEIGHT_BIAS),
        Rule("tmlp.2", "time_embed.linear_2", WEIGHT_BIAS),
        Rule("tproj.1", "time_mod_proj", WEIGHT_BIAS),
        Rule("txtmlp.0.scale", "txt_in.norm.weight", PARAMETER),
        Rule("txtmlp.1", "txt_in.linear_1", WEIGHT_BIAS),
        Rule("txtmlp.3", "txt_in.linear_2", WEIGHT_BIAS),
        Rule("txtfusion.projector", "text_fusion.projector", WEIGHT),
        *_block("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
        *_block("txtfusion.refiner_blocks", "text_fusion.refiner_blocks"),
        *_block("blocks", "transformer_blocks"),
        # six vectors: one after the other in ours, a table in diffusers'
        Rule("blocks.#.mod.lin", "transformer_blocks.#.scale_shift_table", PARAMETER, folded=6),
        Rule("last.norm.scale", "final_layer.norm.weight", PARAMETER),
        Rule("last.linear", "final_layer.linear", WEIGHT_BIAS),
        Rule("last.modulation.lin", "final_layer.scale_shift_table", PARAMETER),
    ),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class."""
    block, text = "blocks.0.attn.", "txtfusion.layerwise_blocks.0."
    head_dim = shapes[block + "qknorm.qnorm.scale"][0]
    text_head_dim = shapes[text + "attn.qknorm.qnorm.scale"][0]
    return {
        "in_channels": shapes["first.weight"][1],
        "num_layers": depth(shapes, "blocks"),
        "attention_head_dim": head_dim,
        "num_attention_heads": shapes[block + "wq.weight"][0] // head_dim,
        "num_key_value_heads": shapes[block + "wk.weight"][0] // head_dim,
        "intermediate_size": shapes["blocks.0.mlp.gate.weight"][0],
        "timestep_embed_dim": shapes["tmlp.0.weight"][1],
        "text_hidden_dim": shapes["txtmlp.0.scale"][0],
        "num_text_layers": shapes["txtfusion.projector.weight"][1],
        "text_num_attention_heads": shapes[text + "attn.wq.weight"][0] // text_head_dim,
        "text_num_key_value_heads": shapes[text + "attn.wk.weight"][0] // text_head_dim,
        "text_intermediate_size": shapes[text + "mlp.gate.weight"][0],
        "num_layerwise_text_blocks": depth(shapes, "txtfusion.layerwise_blocks"),
        "num_refiner_text_blocks": depth(shapes, "txtfusion.refiner_blocks"),
    }


_FILES = ("krea2_turbo_int8_convrot.safetensors", "krea2_turbo_fp8_scaled.safetensors")

ARCHITECTURE = Architecture(
    name="krea2",
    title="Krea 2",
    license="",
    repositories=(),
    defaults=None,
    signature=(
        "first.weight",
        "tmlp.0.weight",
        "txtmlp.0.scale",
        "txtfusion.projector.weight",
        "blocks.0.mod.lin",
        "blocks.0.attn.wq.weight",
        "blocks.0.attn.qknorm.qnorm.scale",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format=None,
    dtypes=("bfloat16", "float16", "float32"),
    # What diffusers keeps in float32: the norms.
    keep_float32=(r"norm\.scale$", r"^txtmlp\.0\.scale$"),
    quantization=CardPolicy(
        blocks=DIFFUSERS.globs("blocks.*.attn.w[qkvo]", "blocks.*.attn.gate", "blocks.*.mlp.*"),
        never=DIFFUSERS.never(
            ("first", "the first layer: 64 inputs"),
            ("tmlp.*", "the timestep enters here, in one row"),
            ("tproj.1", "modulation, shared by all blocks"),
            ("txtfusion.*", "it mixes the layers of the text encoder"),
            ("txtmlp.*", "the text's only projection"),
            ("last.*", "the last layer, straight into the latent"),
        ),
        layout="int8_convrot",
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="Krea2Transformer2DModel",
    files={
        "diffusion_models": _FILES,
        "text_encoders": ("qwen3vl_4b_fp8_scaled.safetensors",),
        "vae": ("qwen_image_vae.safetensors",),
    },
    downloads={
        **hub("Comfy-Org/Krea-2", *_FILES, folder="diffusion_models"),
        **shared("qwen3vl_4b_fp8_scaled.safetensors", "qwen_image_vae.safetensors"),
    },
)
