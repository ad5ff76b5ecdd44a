"""What the cards of Sana and of its distilled kind share: sizes from shapes, the publisher's own key layout, prompts,
policy."""
# Sources: config.json of Efficient-Large-Model's repositories, diffusers' Sana converter and pipelines 0.42.1.

from __future__ import annotations

import math
from typing import Any

from ..quant.policy import CardPolicy
from ..text_encoders.prompt import Prompt
from ._architecture import KeyMap, Shapes

PUBLISHER = "Efficient-Large-Model"
GUIDANCE = "time_embed.guidance_embedder.linear_1.weight"
SIGNATURE = (
    "patch_embed.proj.weight",
    "caption_norm.weight",
    "caption_projection.linear_1.weight",
    "time_embed.linear.bias",
    "transformer_blocks.0.scale_shift_table",
    "transformer_blocks.0.attn1.to_q.weight",
    "transformer_blocks.0.attn2.to_k.bias",
    "transformer_blocks.0.ff.conv_inverted.bias",
    "proj_out.bias",
)

# No shape tells the heads of these two widths, which are all that was published.
CROSS_HEADS = {2240: (20, 112), 1152: (16, 72)}
HEAD_DIM = 32
# Tokens of the table in the publisher's 2K and 4K files -> (sample_size, interpolation_scale).
POSITION_TABLES = {64 * 64: (64, 1.0), 128 * 128: (128, 2.0)}

# The feed-forward's two 1x1 convolutions are matrices in our module, and published as [out, in, 1, 1]; files in which
# they are [out, in], as quantized ones are, load as well.
POLICY = CardPolicy(
    blocks=(
        "transformer_blocks.*.attn1.to_[qkv]",
        "transformer_blocks.*.attn1.to_out.0",
        "transformer_blocks.*.attn2.to_[qkv]",
        "transformer_blocks.*.attn2.to_out.0",
        "transformer_blocks.*.ff.conv_inverted",
        "transformer_blocks.*.ff.conv_point",
    ),
    pointwise=("transformer_blocks.*.ff.conv_inverted", "transformer_blocks.*.ff.conv_point"),
    never=(
        ("transformer_blocks.*.ff.conv_depth", "a 3x3 filter per channel is no matrix"),
        ("time_embed.*", "the timestep enters here, in one row, and every token depends on it"),
        ("caption_projection.*", "the text's only projection"),
        ("patch_embed.*", "the first layer: 32 inputs"),
        ("proj_out", "the last layer, straight into the latent"),
    ),
)

# Read by the text encoder before every prompt (the publisher's text, word for word: the model was trained with it).
# Negative prompts have none. Its tokens but the first and the last are not shown to the transformer, see Prompt.
INSTRUCTION = "\n".join(
    (
        "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for "
        "image generation. Evaluate the level of detail in the user prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
        "relationships to create vivid and concrete scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly without "
        "overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
        "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
        "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
        "skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including any additional "
        "commentary or evaluations:",
        "User Prompt: ",
    )
)

PROMPT = Prompt(clean="lower_strip", instruction=INSTRUCTION, max_length=300, bos=True)


def repositories(*names: str) -> tuple[str, ...]:
    """The publisher's repositories on Hugging Face."""
    return tuple(f"{PUBLISHER}/{name}" for name in names)


def publisher_layout(time_embed: str) -> KeyMap:
    """The layout of the publisher's pickles, which ComfyUI's core takes for another model.

    Given is where the two layers of the timestep are in ours.
    """
    # The files end in .pth; by `t_block.1.weight` they are PixArt-Sigma; the place is "time_embed.emb" or "time_embed".
    block = r"^blocks\.(\d+)\."
    ours = r"transformer_blocks.\1."
    return KeyMap(
        name="publisher",
        marker="attention_y_norm.weight",
        rules=(
            (r"^x_embedder\.", "patch_embed."),
            (r"^y_embedder\.y_proj\.fc([12])\.", r"caption_projection.linear_\1."),
            (r"^attention_y_norm\.", "caption_norm."),
            (r"^t_embedder\.mlp\.0\.", f"{time_embed}.timestep_embedder.linear_1."),
            (r"^t_embedder\.mlp\.2\.", f"{time_embed}.timestep_embedder.linear_2."),
            (r"^cfg_embedder\.mlp\.0\.", "time_embed.guidance_embedder.linear_1."),
            (r"^cfg_embedder\.mlp\.2\.", "time_embed.guidance_embedder.linear_2."),
            (r"^t_block\.1\.", "time_embed.linear."),
            (r"^final_layer\.linear\.", "proj_out."),
            (r"^final_layer\.scale_shift_table$", "scale_shift_table"),
            (block + r"attn\.qkv\.", ours + "attn1.to_qkv."),
            (block + r"attn\.proj\.", ours + "attn1.to_out.0."),
            (block + r"attn\.([qk])_norm\.", ours + r"attn1.norm_\2."),
            (block + r"cross_attn\.q_linear\.", ours + "attn2.to_q."),
            (block + r"cross_attn\.kv_linear\.", ours + "attn2.to_kv."),
            (block + r"cross_attn\.proj\.", ours + "attn2.to_out.0."),
            (block + r"cross_attn\.([qk])_norm\.", ours + r"attn2.norm_\2."),
            (block + r"mlp\.(inverted|depth|point)_conv\.conv\.", ours + r"ff.conv_\2."),
            (block + r"scale_shift_table$", ours + "scale_shift_table"),
        ),
        fused=(
            (r"\.attn1\.to_qkv\.", (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v.")),
            (r"\.attn2\.to_kv\.", (".attn2.to_k.", ".attn2.to_v.")),
        ),
        ignored=(r"^y_embedder\.y_embedding$", r"^pos_embed$", r"^logvar_linear\."),
    )


def sizes(shapes: Shapes) -> dict[str, Any] | None:
    """Constructor arguments, from dimensions that packing never changes. None: Sana's ControlNet, or no such thing."""
    patch, dim = shapes["patch_embed.proj.weight"], shapes["caption_norm.weight"][0]
    hidden = shapes["transformer_blocks.0.ff.conv_inverted.bias"][0] // 2
    if len(patch) != 4 or shapes["time_embed.linear.bias"][0] != 6 * dim or "controlnet_blocks.0.weight" in shapes:
        return None
    mlp_ratio = hidden / dim
    if int(dim * mlp_ratio) != hidden:  # the quotient rounded down: stay clear of the edge
        mlp_ratio = (hidden + 0.5) / dim
    head_dim = math.gcd(dim, HEAD_DIM)  # for a width nobody published this is a guess, and a config entry says better
    cross_heads, cross_head_dim = CROSS_HEADS.get(dim, (dim // head_dim, head_dim))
    config = {
        "in_channels": patch[1],
        "out_channels": shapes["proj_out.bias"][0] // patch[2] ** 2,
        "patch_size": patch[2],
        "num_attention_heads": dim // head_dim,
        "attention_head_dim": head_dim,
        "num_layers": 1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("transformer_blocks.")),
        "num_cross_attention_heads": cross_heads,
        "cross_attention_head_dim": cross_head_dim,
        "cross_attention_dim": dim,
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
        "mlp_ratio": mlp_ratio,
        "attention_bias": "transformer_blocks.0.attn1.to_q.bias" in shapes,
        "qk_norm": "rms_norm_across_heads" if "transformer_blocks.0.attn1.norm_q.weight" in shapes else None,
    }
    if "pos_embed" in shapes and shapes["pos_embed"][1] in POSITION_TABLES:
        config["sample_size"], config["interpolation_scale"] = POSITION_TABLES[shapes["pos_embed"][1]]
    return config
