"""CogView4 beside diffusers' CogView4Transformer2DModel 0.42.1.

Text is padded and the padding can be masked; what the network computes where padding stands is read by nobody, and the
two implementations differ there, so those positions are not compared.
"""

from __future__ import annotations

from typing import Any

import torch

from ..capture import Tap
from ..port import Config, Inputs, Port, Recorded, ReferencePipeline, Stage, import_reference

BLOCK = "transformer_blocks.{i}"
ATTENTION = f"{BLOCK}.attn1"
TIME = "time_condition_embed"
SIZES = ("original_size", "target_size", "crop_coords")


def run_ours(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return module(
        inputs["hidden_states"],
        inputs["timestep"],
        inputs["encoder_hidden_states"],
        inputs.get("text_mask"),
        **{name: inputs[name] for name in SIZES},
    )


def run_reference(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    """The reference masks text in its training processor alone; the usual one adds 1 or 0 to the scores."""
    given = dict(inputs)
    mask = given.pop("text_mask", None)
    if mask is None:
        return module(**given).sample
    processor = import_reference("diffusers.models.transformers.transformer_cogview4:CogView4TrainingAttnProcessor")
    for block in module.transformer_blocks:
        block.attn1.processor = processor()
    return module(**given, attention_kwargs={"text_attn_mask": mask.to(torch.int32)}).sample


def real_tokens(value: torch.Tensor, inputs: Inputs, dim: int = 1) -> torch.Tensor:
    """The tokens [B, text + image, ...] (or only the text's) that somebody reads, flattened over the batch."""
    value = value.movedim(dim, 1)
    mask = inputs.get("text_mask")
    if mask is None:
        return value
    keep = torch.ones(value.shape[:2], dtype=torch.bool)
    keep[:, : mask.shape[1]] = mask.bool().cpu()
    return value[keep]


def real_heads(value: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """As ``real_tokens``, for [B, H, L, D]."""
    return real_tokens(value, inputs, dim=2)


def real_queries(mask: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """A mask [B or 1, 1, L_q, L_k] in the rows of real tokens."""
    batch = inputs["hidden_states"].shape[0]
    return real_tokens(mask.expand(batch, -1, -1, -1), inputs, dim=2)


def text_then_image(out: Any) -> torch.Tensor:
    """The reference returns (image, text)."""
    return torch.cat((out[1], out[0]), dim=1)


def joined(text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    return torch.cat((text, image), dim=1)


def second_first(calls: list[torch.Tensor]) -> torch.Tensor:
    """The reference calls the feed-forward for the image and then for the text; ours once, text before image."""
    return torch.cat(calls[::-1], dim=1)


def halves(out: Any) -> torch.Tensor:
    """Cosines and sines [L, D], each half twice, as ours: [L, D / 2, 2]."""
    cos, sin = out
    return torch.stack((cos, sin), dim=-1)[:, : cos.shape[-1] // 2]


def image_rope(given: Any) -> torch.Tensor:
    return given["pe"][given["txt"].shape[1] :]


def same(name: str, **more: Any) -> Stage:
    return Stage(name, Tap(name), **more)


def both_streams(name: str, what: str = "output") -> Stage:
    suffix = "" if what == "output" else f".{what}"
    return Stage(name + suffix, Tap(name, what), Tap(name, what, join=second_first), real_tokens)


def as_ours(given: Any) -> torch.Tensor:
    return torch.cat((given["encoder_hidden_states"], given["hidden_states"]), dim=1)


STAGES = (
    same("patch_embed.proj"),
    same("patch_embed.text_proj"),
    Stage(f"{TIME}.timestep", Tap(f"{TIME}.timestep_embedder", "input")),
    Stage(f"{TIME}.sizes", Tap(f"{TIME}.condition_embedder", "input")),
    same(f"{TIME}.timestep_embedder"),
    same(f"{TIME}.condition_embedder"),
    same(TIME),
    Stage("rope", Tap("transformer_blocks.0", "input", image_rope), Tap("rope", pick=halves)),
    same(f"{BLOCK}.norm1.linear"),
    Stage(f"{ATTENTION}.input", Tap(ATTENTION, "input"), Tap(ATTENTION, "input", as_ours), real_tokens),
    same(f"{ATTENTION}.to_q", compared=real_tokens),
    same(f"{ATTENTION}.to_k", compared=real_tokens),
    same(f"{ATTENTION}.to_v", compared=real_tokens),
    Stage(f"{ATTENTION}.mask", Tap(ATTENTION, "mask"), compared=real_queries),
    Stage(f"{ATTENTION}.query", Tap(ATTENTION, "query"), compared=real_heads),
    Stage(f"{ATTENTION}.key", Tap(ATTENTION, "key"), compared=real_heads),
    Stage(f"{ATTENTION}.value", Tap(ATTENTION, "value"), compared=real_heads),
    Stage(f"{ATTENTION}.attended", Tap(f"{ATTENTION}.to_out.0", "input"), compared=real_tokens),
    Stage(ATTENTION, Tap(ATTENTION), Tap(ATTENTION, pick=text_then_image), real_tokens),
    both_streams(f"{BLOCK}.ff", "input"),
    both_streams(f"{BLOCK}.ff.net.0"),
    both_streams(f"{BLOCK}.ff"),
    Stage(
        BLOCK,
        Tap(BLOCK, pick=lambda out: torch.cat((out["txt"], out["img"]), dim=1)),
        Tap(BLOCK, pick=text_then_image),
        real_tokens,
    ),
    same("norm_out"),
    same("proj_out"),
    Stage("output", Tap(""), Tap("", pick=lambda out: out.sample)),
)

TINY = {
    "cogview4": {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "text_embed_dim": 24,
        "time_embed_dim": 32,
        "condition_dim": 16,
    }
}


def inputs(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two pictures, one with less text than the other, each cut from another place."""
    side = config["patch_size"]
    height, width = 4 * side, 6 * side
    pixels = torch.tensor([[8.0 * height, 8.0 * width]] * 2)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    states = torch.randn(2, 8, config["text_embed_dim"], generator=generator)
    states[0, :3] *= 3.0
    return {
        "hidden_states": torch.randn(2, config["in_channels"], height, width, generator=generator),
        "timestep": torch.tensor([731.0, 12.0]),
        "encoder_hidden_states": states,
        "original_size": pixels * 2,
        "target_size": pixels,
        "crop_coords": torch.tensor([[0.0, 16.0], [32.0, 0.0]]),
        "text_mask": mask,
    }


def schedule(steps: int, latent_height: int, latent_width: int) -> Any:
    """The published scheduler, set up as the pipeline does: whole timesteps, a shift from the number of tokens."""
    scheduler = import_reference("diffusers:FlowMatchEulerDiscreteScheduler")(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    calculate_shift = import_reference("diffusers.pipelines.cogview4.pipeline_cogview4:calculate_shift")
    times = [float(int(1000 - 999 * i / max(steps - 1, 1))) for i in range(steps)]
    mu = calculate_shift(latent_height * latent_width // 4, 256, 0.25, 0.75)
    scheduler.set_timesteps(timesteps=times, sigmas=[time / 1000 for time in times], mu=mu)
    return scheduler


def sigmas(steps: int, latent_height: int, latent_width: int) -> list[float]:
    return schedule(steps, latent_height, latent_width).sigmas.tolist()


PORT = Port(
    reference="diffusers:CogView4Transformer2DModel",
    run_ours=run_ours,
    run_reference=run_reference,
    stages=STAGES,
    tiny=TINY,
    inputs=inputs,
    recorded={
        "patch_embed.proj": Recorded(("patch_embed.0",)),
        "patch_embed.text_proj": Recorded(("patch_embed.1",)),
        TIME: Recorded(("time_embed",)),
        "rope": Recorded(("rope.0", "rope.1"), lambda cos, sin: halves((cos, sin))),
        ATTENTION.format(i=0): Recorded(("block_first_attn.1", "block_first_attn.0"), joined),
        BLOCK.format(i=0): Recorded(("block_first.1", "block_first.0"), joined),
        "norm_out": Recorded(("norm_out",)),
    },
    fixtures=("cogview4",),
    pipelines={"cogview4": ReferencePipeline("diffusers' CogView4Pipeline", sigmas, None, lambda prompt: prompt)},
)
