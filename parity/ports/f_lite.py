"""F-Lite beside recordings of fal-ai/f-lite at 85f0471 (its licence forbids to ship it, and no package has it)."""

from __future__ import annotations

from typing import Any

import torch

from ..capture import Tap
from ..port import Config, Inputs, Port, Recorded, Stage

BLOCK = "blocks.{i}"


def run_ours(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return module(inputs["x"], inputs["timesteps"], inputs["context"])


def same(name: str, **tap: Any) -> Stage:
    return Stage(name, Tap(name, **tap))


STAGES = (
    same("patch_embed"),
    same("time_embed"),
    same(f"{BLOCK}.self_attn", pick=lambda out: out[0]),
    same(f"{BLOCK}.cross_attn"),
    same(f"{BLOCK}.mlp"),
    same(BLOCK, pick=lambda out: out["img"]),
    same("final_norm"),
    same("final_proj"),
    Stage("output", Tap("")),
)

TINY = {
    "f_lite": {
        "in_channels": 16,
        "patch_size": 2,
        "hidden_size": 48,
        "depth": 3,
        "num_heads": 3,
        "mlp_ratio": 4.0,
        "cross_attn_input_size": 24,
    }
}


def inputs(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(2, config["in_channels"], 8, 12, generator=generator),
        "timesteps": torch.rand(2, generator=generator),
        "context": torch.randn(2, 7, config["cross_attn_input_size"], generator=generator),
    }


PORT = Port(
    reference=None,
    run_ours=run_ours,
    run_reference=None,
    stages=STAGES,
    tiny=TINY,
    inputs=inputs,
    recorded={
        "patch_embed": Recorded(("patch_embed",)),
        "time_embed": Recorded(("time_embed",)),
        "blocks.0.self_attn": Recorded(("block_first_self_attn.0",)),
        "blocks.0.cross_attn": Recorded(("block_first_cross_attn.0",)),
        "blocks.0.mlp": Recorded(("block_first_mlp",)),
        "blocks.0": Recorded(("block_first.0",)),
        "final_norm": Recorded(("final_norm",)),
        "final_proj": Recorded(("final_proj",)),
    },
    fixtures=("flite",),
    latent="x",
    time="timesteps",
)
