"""Nucleus-Image beside the class of diffusers.

Experts choose tokens, so a last bit can move a token from one to another; stages after such a flip differ by much.
"""
# diffusers' NucleusMoEImageTransformer2DModel 0.42.1.

from __future__ import annotations

from typing import Any

import torch

from ...ldm.layers.patches import patchify, unpatchify
from ..capture import Tap
from ..port import Config, Inputs, Port, Recorded, ReferencePipeline, Stage, import_reference

PATCH_SIZE = 2
BLOCK = "transformer_blocks.{i}"
ATTENTION, MLP = f"{BLOCK}.attn", f"{BLOCK}.img_mlp"


def run_ours(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return module(
        inputs["latent"],
        inputs["timestep"],
        inputs["encoder_hidden_states"],
        inputs.get("encoder_hidden_states_mask"),
    )


def run_reference(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    """The reference takes tokens; its output becomes a latent again."""
    x = inputs["latent"]
    height, width = x.shape[-2:]
    out = module(
        hidden_states=patchify(x, PATCH_SIZE),
        img_shapes=[(1, height // PATCH_SIZE, width // PATCH_SIZE)] * x.shape[0],
        encoder_hidden_states=inputs["encoder_hidden_states"],
        encoder_hidden_states_mask=inputs.get("encoder_hidden_states_mask"),
        timestep=inputs["timestep"],
    ).sample
    return unpatchify(out, PATCH_SIZE, height, width)


def table(out: Any) -> torch.Tensor:
    """The reference's two complex tables as ours: [image + text, D / 2, 2], cosine and sine."""
    return torch.view_as_real(torch.cat(out))


def tokens(out: Any) -> torch.Tensor:
    """Ours gives a latent, the reference tokens."""
    return patchify(out, PATCH_SIZE)


def first_argument(given: Any) -> torch.Tensor:
    return next(iter(given.values()))


def same(name: str, **tap: Any) -> Stage:
    return Stage(name, Tap(name, **tap))


STAGES = (
    same("img_in"),
    same("txt_norm"),
    Stage("rope", Tap("transformer_blocks.0", "input", lambda given: given["pe"]), Tap("pos_embed", pick=table)),
    Stage("time.input", Tap("time_text_embed.timestep_embedder", "input", first_argument)),
    same("time_text_embed"),
    same(f"{BLOCK}.img_mod"),
    same(f"{BLOCK}.encoder_proj"),
    Stage(f"{ATTENTION}.input", Tap(ATTENTION, "input", first_argument)),
    *(same(f"{ATTENTION}.{name}") for name in ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj")),
    *(same(f"{ATTENTION}.{name}") for name in ("norm_q", "norm_k", "norm_added_k")),
    Stage(f"{ATTENTION}.attended", Tap(f"{ATTENTION}.to_out.0", "input", first_argument)),
    same(ATTENTION),
    Stage(f"{MLP}.input", Tap(MLP, "input", first_argument)),
    same(f"{MLP}.gate"),
    same(f"{MLP}.shared_expert"),
    same(MLP),
    Stage(BLOCK, Tap(BLOCK, pick=lambda out: out["img"]), Tap(BLOCK)),
    same("norm_out"),
    Stage("proj_out", Tap("proj_out"), Tap("proj_out")),
    Stage("output", Tap("", pick=tokens), Tap("", pick=lambda out: out.sample)),
)

TINY = {
    "nucleus_image": {
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": (4, 6, 6),
        "dense_moe_strategy": "all_moe",
        "num_experts": 4,
        "moe_intermediate_dim": 24,
        "capacity_factors": 2.0,
    }
}


def inputs(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two pictures with an odd number of rows at different times, one text shorter than the other, padding loud."""
    states = torch.randn(2, 7, config["joint_attention_dim"], generator=generator)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    states[0, 4:] *= 3.0
    return {
        "latent": torch.randn(2, config["in_channels"] // PATCH_SIZE**2, 10, 12, generator=generator),
        "timestep": torch.tensor([0.75, 0.125]),
        "encoder_hidden_states": states,
        "encoder_hidden_states_mask": mask,
    }


def complete(config: Config) -> dict[str, Any]:
    """The reference asks whether one factor stands for all blocks by asking for a list."""
    factors = config["capacity_factors"]
    return {**config, "capacity_factors": list(factors) if isinstance(factors, tuple) else factors}


def reference_weights(weights: Inputs) -> dict[str, torch.Tensor]:
    """Expert banks are bare tensors there, [experts, in, out]."""
    return {
        key.removesuffix(".weight") if ".experts." in key else key: (
            value.transpose(1, 2).contiguous() if key.endswith("_proj.weight") and ".experts." in key else value
        )
        for key, value in weights.items()
    }


def sigmas(steps: int, latent_height: int, latent_width: int) -> list[float]:
    """Without a shift, which is what most say of the published scheduler."""
    scheduler = import_reference("diffusers:FlowMatchEulerDiscreteScheduler")(shift=1.0)
    scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    return scheduler.sigmas.tolist()


PORT = Port(
    reference="diffusers:NucleusMoEImageTransformer2DModel",
    run_ours=run_ours,
    run_reference=run_reference,
    stages=STAGES,
    tiny=TINY,
    inputs=inputs,
    complete=complete,
    reference_weights=reference_weights,
    recorded={
        "img_in": Recorded(("patch_embed",)),
        "txt_norm": Recorded(("text_norm",)),
        "time_text_embed": Recorded(("time_embed",)),
        "rope": Recorded(("rope.0", "rope.1"), lambda image, text: torch.cat((image, text))),
        "transformer_blocks.0.attn": Recorded(("block_first_attn",)),
        "transformer_blocks.0.img_mlp": Recorded(("block_first_mlp",)),
        "transformer_blocks.0": Recorded(("block_first",)),
        "norm_out": Recorded(("norm_out",)),
        "output": Recorded(("output",)),
    },
    fixtures=("nucleus_moe_image",),
    pipelines={
        "nucleus_image": ReferencePipeline(
            "diffusers' NucleusMoEImagePipeline", sigmas, lambda sigma, height, width: sigma
        )
    },
    latent="latent",
)
