"""All kinds of Sana beside the class of diffusers."""
# Sana, SANA-1.5 and SANA-Sprint; diffusers' SanaTransformer2DModel 0.42.1.

from __future__ import annotations

from typing import Any

import torch

from ..capture import Tap
from ..port import Config, Inputs, Port, Recorded, Stage

BLOCK = "transformer_blocks.{i}"
SELF, CROSS, FF = f"{BLOCK}.attn1", f"{BLOCK}.attn2", f"{BLOCK}.ff"


def run_ours(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return module(
        inputs["hidden_states"],
        inputs["timestep"],
        inputs["encoder_hidden_states"],
        inputs.get("encoder_attention_mask"),
        guidance=inputs.get("guidance"),
    )


def run_reference(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return module(**inputs).sample


def tokens(picture: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, H * W, C]: the reference's feed-forward works on a picture."""
    return picture.flatten(2).transpose(1, 2)


def rows_joined(out: torch.Tensor) -> torch.Tensor:
    """[B, H, W, C] -> [B, H * W, C]"""
    return out.flatten(1, -2)


def picture_tokens(given: Any) -> torch.Tensor:
    return tokens(given["hidden_states"])


def first_argument(given: Any) -> torch.Tensor:
    return next(iter(given.values()))


def same(name: str, **tap: Any) -> Stage:
    return Stage(name, Tap(name, **tap))


def input_of(name: str) -> Stage:
    return Stage(f"{name}.input", Tap(name, "input", first_argument))


STAGES = (
    same("patch_embed"),
    same("caption_projection"),
    same("caption_norm"),
    input_of("time_embed.emb.timestep_embedder"),
    input_of("time_embed.timestep_embedder"),
    input_of("time_embed.guidance_embedder"),
    same("time_embed.emb.timestep_embedder"),
    same("time_embed.timestep_embedder"),
    same("time_embed.guidance_embedder"),
    same("time_embed.linear"),
    same(f"{BLOCK}.norm1"),
    input_of(SELF),
    *(same(f"{SELF}.{name}") for name in ("to_q", "to_k", "to_v", "norm_q", "norm_k")),
    input_of(f"{SELF}.to_out.0"),
    same(SELF),
    input_of(CROSS),
    *(same(f"{CROSS}.{name}") for name in ("to_q", "to_k", "to_v", "norm_q", "norm_k")),
    *(Stage(f"{CROSS}.{what}", Tap(CROSS, what)) for what in ("mask", "query", "key", "value")),
    input_of(f"{CROSS}.to_out.0"),
    same(CROSS),
    same(f"{BLOCK}.norm2"),
    Stage(f"{FF}.input", Tap(FF, "input"), Tap(FF, "input", picture_tokens)),
    Stage(f"{FF}.conv_inverted", Tap(f"{FF}.conv_inverted", pick=rows_joined), Tap(f"{FF}.conv_inverted", pick=tokens)),
    same(f"{FF}.conv_depth"),
    Stage(FF, Tap(FF), Tap(FF, pick=tokens)),
    Stage(BLOCK, Tap(BLOCK, pick=lambda out: out["img"]), Tap(BLOCK)),
    input_of("proj_out"),
    same("proj_out"),
    Stage("output", Tap(""), Tap("", pick=lambda out: out.sample)),
)

COMMON = {
    "in_channels": 32,
    "out_channels": 32,
    "num_attention_heads": 3,
    "attention_head_dim": 16,
    "num_layers": 3,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 12,
    "cross_attention_dim": 48,
    "caption_channels": 24,
    "mlp_ratio": 2.5,
    "sample_size": 8,
}
TINY = {
    "sana": COMMON,
    "sana_sprint": {**COMMON, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads"},
}


def inputs(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two pictures at different times, one text shorter than the other, padding loud."""
    states = torch.randn(2, 7, config["caption_channels"], generator=generator)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0
    states[0, 4:] *= 3.0
    given = {
        "hidden_states": torch.randn(2, config["in_channels"], 4, 6, generator=generator),
        "encoder_hidden_states": states,
        "encoder_attention_mask": mask,
    }
    if config.get("guidance_embeds"):
        return given | {"timestep": torch.rand(2, generator=generator), "guidance": torch.tensor([0.45, 0.1])}
    return given | {"timestep": torch.tensor([731.0, 12.0])}


PORT = Port(
    reference="diffusers:SanaTransformer2DModel",
    run_ours=run_ours,
    run_reference=run_reference,
    stages=STAGES,
    tiny=TINY,
    inputs=inputs,
    recorded={
        "patch_embed": Recorded(("patch_embed",)),
        "caption_norm": Recorded(("text_embed",)),
        "time_embed.linear": Recorded(("time_embed.0",)),
        SELF.format(i=0): Recorded(("block_first_self_attn",)),
        CROSS.format(i=0): Recorded(("block_first_cross_attn",)),
        FF.format(i=0): Recorded(("block_first_mlp",), tokens),
        BLOCK.format(i=0): Recorded(("block_first",)),
        "proj_out.input": Recorded(("norm_out",)),
    },
    fixtures=("sana",),
)
