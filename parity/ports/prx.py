"""All three kinds of PRX beside the class of diffusers."""
# diffusers' PRXTransformer2DModel 0.42.1.

from __future__ import annotations

from typing import Any

import torch

from ..capture import Tap
from ..port import Config, Inputs, Port, Recorded, ReferencePipeline, Stage, import_reference

HEAD_DIM = 16
ATTENTION = "blocks.{i}.attention"


def run_ours(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return module(
        inputs["hidden_states"], inputs["timestep"], inputs["encoder_hidden_states"], inputs.get("attention_mask")
    )


def run_reference(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    return module(**inputs).sample


def rotation(out: torch.Tensor) -> torch.Tensor:
    """[B, 1, L, D / 2, 2, 2], a rotation matrix per pair, as ours: [L, D / 2, 2], its cosine and sine."""
    return torch.stack((out[0, 0, ..., 0, 0], out[0, 0, ..., 1, 0]), dim=-1)


def chunks(out: Any) -> torch.Tensor:
    """Shift, scale and gate twice, however they are nested, as [B, 1, 6 * D]."""
    flat = [part for item in out for part in (item if isinstance(item, tuple) else (item,))]
    return torch.cat(flat, dim=-1)


def heads_last(out: torch.Tensor) -> torch.Tensor:
    """[B, H, L, D] -> [B, L, H, D]"""
    return out.transpose(1, 2)


def one_row(given: Any) -> torch.Tensor:
    """All pictures of a batch are of one size: the reference repeats it, ours does not."""
    return given["x"][:1]


def same(name: str, **tap: Any) -> Stage:
    return Stage(name, Tap(name, **tap))


def norm(name: str) -> Stage:
    return Stage(name, Tap(name), Tap(name, pick=heads_last))


STAGES = (
    Stage("rope", Tap("blocks.0", "input", lambda given: given["pe"]), Tap("pe_embedder", pick=rotation)),
    same("img_in"),
    same("txt_in"),
    Stage("time_in.input", Tap("time_in", "input")),
    same("time_in"),
    Stage("resolution_embedder.input", Tap("resolution_embedder.mlp", "input", one_row)),
    same("resolution_embedder"),
    same("blocks.{i}.modulation", pick=chunks),
    Stage(f"{ATTENTION}.input", Tap(ATTENTION, "input")),
    same(f"{ATTENTION}.img_qkv_proj"),
    same(f"{ATTENTION}.txt_kv_proj"),
    norm(f"{ATTENTION}.norm_q"),
    norm(f"{ATTENTION}.norm_k"),
    norm(f"{ATTENTION}.norm_added_k"),
    Stage(f"{ATTENTION}.mask", Tap(ATTENTION, "mask")),
    Stage(f"{ATTENTION}.query", Tap(ATTENTION, "query")),
    Stage(f"{ATTENTION}.key", Tap(ATTENTION, "key")),
    Stage(f"{ATTENTION}.value", Tap(ATTENTION, "value")),
    Stage(f"{ATTENTION}.attended", Tap(f"{ATTENTION}.to_out.0", "input")),
    same(ATTENTION),
    Stage("blocks.{i}.mlp.input", Tap("blocks.{i}.gate_proj", "input")),
    same("blocks.{i}.gate_proj"),
    same("blocks.{i}.up_proj"),
    Stage("blocks.{i}.down_proj.input", Tap("blocks.{i}.down_proj", "input")),
    same("blocks.{i}.down_proj"),
    Stage("blocks.{i}", Tap("blocks.{i}", pick=lambda out: out["img"]), Tap("blocks.{i}")),
    same("final_layer.adaLN_modulation"),
    Stage("final_layer.linear.input", Tap("final_layer.linear", "input")),
    same("final_layer"),
    Stage("output", Tap(""), Tap("", pick=lambda out: out.sample)),
)

COMMON = {"context_in_dim": 24, "hidden_size": 3 * HEAD_DIM, "mlp_ratio": 3.5, "num_heads": 3, "depth": 3}
TINY = {
    "prx": {"in_channels": 16, "patch_size": 2, **COMMON},
    "prx_dc_ae": {"in_channels": 32, "patch_size": 1, **COMMON},
    "prx_pixel": {"in_channels": 3, "patch_size": 8, "bottleneck_size": 12, "resolution_embeds": True, **COMMON},
}


def inputs(config: Config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Two pictures at different times, one text shorter than the other, padding loud."""
    side = config["patch_size"]
    states = torch.randn(2, 7, config["context_in_dim"], generator=generator)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    states[0, 4:] *= 3.0
    return {
        "hidden_states": torch.randn(2, config["in_channels"], 4 * side, 6 * side, generator=generator),
        "timestep": torch.rand(2, generator=generator),
        "encoder_hidden_states": states,
        "attention_mask": mask,
    }


def complete(config: Config) -> dict[str, Any]:
    """Ours gives rows and columns half a head each when nothing is said; the reference wants to be told."""
    half = config["hidden_size"] // config["num_heads"] // 2
    return {**config, "axes_dim": list(config.get("axes_dim") or (half, half))}


def sigmas(steps: int, latent_height: int, latent_width: int) -> list[float]:
    scheduler = import_reference("diffusers:FlowMatchEulerDiscreteScheduler")(shift=3.0)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.tolist()


def clean_fully(prompt: str) -> str:
    return import_reference("diffusers.pipelines.prx.pipeline_prx:TextPreprocessor")().clean_text(prompt)


def clean_lightly(prompt: str) -> str:
    return import_reference("diffusers.pipelines.prx.pipeline_prx_pixel:_basic_clean")(prompt)


LATENT = ReferencePipeline("diffusers' PRXPipeline", sigmas, lambda sigma, height, width: sigma, clean_fully)
PIXEL = ReferencePipeline("diffusers' PRXPixelPipeline", sigmas, lambda sigma, height, width: sigma, clean_lightly)

PORT = Port(
    reference="diffusers:PRXTransformer2DModel",
    run_ours=run_ours,
    run_reference=run_reference,
    stages=STAGES,
    tiny=TINY,
    inputs=inputs,
    complete=complete,
    recorded={
        "img_in": Recorded(("patch_embed",)),
        "txt_in": Recorded(("text_embed",)),
        "time_in": Recorded(("time_embed",)),
        "resolution_embedder": Recorded(("resolution_embed",)),
        "rope": Recorded(("rope",), rotation),
        "blocks.0.attention": Recorded(("block_first_attn",)),
        "blocks.0": Recorded(("block_first",)),
        "final_layer": Recorded(("final_layer",)),
    },
    fixtures=("prx", "prx_pixel"),
    pipelines={"prx": LATENT, "prx_dc_ae": LATENT, "prx_pixel": PIXEL},
)
