"""What the cards of FLUX.1, FLUX.2 and Chroma share: the names of a double and a single stream block."""

from __future__ import annotations

from ._two_way import PARAMETER, First, Rule

# ComfyUI before 0.14.0 knows the norms as `.scale` alone, later ones take both: `.scale` is what we write.
NORM_SPELLING = (r"(\.norm\.(?:query|key)_norm)\.weight$", r"\1.scale")


def double_block(params: tuple[str, ...], ff: tuple[str, str]) -> tuple[Rule, ...]:
    """Attention and feed-forward of both streams; ``ff``: diffusers' names of the two layers of a feed-forward."""
    rules = []
    for ours, names in (
        ("img", ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k", "ff")),
        ("txt", ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k", "ff_context")),
    ):
        q, k, v, out, norm_q, norm_k, feed = names
        mine, other = f"double_blocks.#.{ours}_", "transformer_blocks.#."
        rules += [
            Rule(f"{mine}attn.qkv", tuple(f"{other}attn.{name}" for name in (q, k, v)), params),
            Rule(f"{mine}attn.proj", f"{other}attn.{out}", params),
            Rule(f"{mine}attn.norm.query_norm.scale", f"{other}attn.{norm_q}.weight", PARAMETER),
            Rule(f"{mine}attn.norm.key_norm.scale", f"{other}attn.{norm_k}.weight", PARAMETER),
            Rule(f"{mine}mlp.0", f"{other}{feed}.{ff[0]}", params),
            Rule(f"{mine}mlp.2", f"{other}{feed}.{ff[1]}", params),
        ]
    return tuple(rules)


SINGLE_NORMS = (
    Rule("single_blocks.#.norm.query_norm.scale", "single_transformer_blocks.#.attn.norm_q.weight", PARAMETER),
    Rule("single_blocks.#.norm.key_norm.scale", "single_transformer_blocks.#.attn.norm_k.weight", PARAMETER),
)


def split_single_block(params: tuple[str, ...]) -> tuple[Rule, ...]:
    """FLUX.1's and Chroma's: one matrix of ours is q, k, v and the first layer of the feed-forward."""
    other = "single_transformer_blocks.#."
    return (
        Rule(
            "single_blocks.#.linear1",
            tuple(other + name for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
            params,
            first=First(3, "single_blocks.#.linear2.weight", 0),
        ),
        Rule("single_blocks.#.linear2", other + "proj_out", params),
        *SINGLE_NORMS,
    )


# Layers that published quantized files of this family hold quantized, as globs.
BLOCKS = (
    "double_blocks.*.img_attn.qkv",
    "double_blocks.*.img_attn.proj",
    "double_blocks.*.img_mlp.[02]",
    "double_blocks.*.txt_attn.qkv",
    "double_blocks.*.txt_attn.proj",
    "double_blocks.*.txt_mlp.[02]",
    "single_blocks.*.linear[12]",
)
