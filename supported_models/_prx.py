"""What the cards of the PRX family share: sizes from shapes, the trainer's own key layout, what may be quantized."""

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import KeyMap, Shapes

_BLOCK, _FACTOR = r"^(blocks\.\d+\.)", r"(?:scale|weight)$"
# The research trainer (Photoroom/PRX) names the attention's layers differently; its checkpoints carry a prefix.
TRAINER_LAYOUT = KeyMap(
    name="trainer",
    marker="blocks.0.img_qkv_proj.weight",
    prefixes=("", "state.model.denoiser."),
    rules=(
        (rf"{_BLOCK}(img_qkv_proj|txt_kv_proj)\.", r"\1attention.\2."),
        (rf"{_BLOCK}qk_norm\.query_norm\.{_FACTOR}", r"\1attention.norm_q.weight"),
        (rf"{_BLOCK}qk_norm\.key_norm\.{_FACTOR}", r"\1attention.norm_k.weight"),
        (rf"{_BLOCK}k_norm\.{_FACTOR}", r"\1attention.norm_added_k.weight"),
        (rf"{_BLOCK}attn_out\.", r"\1attention.to_out.0."),
    ),
)

QUANTIZATION = CardPolicy(
    blocks=(
        "blocks.*.attention.img_qkv_proj",
        "blocks.*.attention.txt_kv_proj",
        "blocks.*.attention.to_out.0",
        "blocks.*.gate_proj",
        "blocks.*.up_proj",
        "blocks.*.down_proj",
    ),
    never=(
        ("blocks.*.modulation.lin", "scales and gates whole blocks; its error reaches every token"),
        ("img_in*", "the only way in for the picture"),
        ("txt_in", "every block reads the text through it"),
        ("time_in.*", "the timestep's embedding steers every block"),
        ("resolution_embedder.*", "small, and steers every block"),
        ("final_layer.*", "writes the picture itself"),
    ),
)

SIGNATURE = (
    "blocks.0.attention.img_qkv_proj.weight",
    "blocks.0.attention.norm_added_k.weight",
    "blocks.0.modulation.lin.weight",
    "txt_in.weight",
    "final_layer.linear.bias",
)


def sizes(shapes: Shapes) -> dict[str, Any]:
    """Constructor arguments that both kinds read the same way, from dimensions that packing never changes."""
    hidden_size = shapes["txt_in.bias"][0]
    mlp_size = shapes["blocks.0.gate_proj.weight"][0]
    mlp_ratio = mlp_size / hidden_size
    if int(hidden_size * mlp_ratio) != mlp_size:  # the quotient rounded down: stay clear of the edge
        mlp_ratio = (mlp_size + 0.5) / hidden_size
    return {
        "context_in_dim": shapes["txt_in.weight"][1],
        "hidden_size": hidden_size,
        "mlp_ratio": mlp_ratio,
        "num_heads": hidden_size // shapes["blocks.0.attention.norm_q.weight"][0],
        "depth": 1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("blocks.")),
    }


def latent_config(shapes: Shapes, in_channels: int, patch_size: int) -> dict[str, Any] | None:
    """Constructor arguments of a latent model whose tokens are so wide, else None: no other number tells the kinds."""
    if shapes["final_layer.linear.bias"][0] != in_channels * patch_size**2:
        return None
    return {"in_channels": in_channels, "patch_size": patch_size, **sizes(shapes)}
