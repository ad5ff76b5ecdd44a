"""SANA-Sprint: Sana distilled to very few steps, with its guidance embedded."""
# 0.6B and 1.6B, by NVIDIA and MIT HAN Lab; 1 to 4 steps.
# Sources: the models' diffusers configurations, diffusers' SanaSprintPipeline 0.42.1, arXiv 2503.09641.

from __future__ import annotations

from typing import Any

from ._architecture import Architecture, Defaults, Sampling, Shapes
from ._sana import GUIDANCE, POLICY, PROMPT, SIGNATURE, publisher_layout, repositories, sizes


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    config = sizes(shapes)
    return None if config is None else {**config, "guidance_embeds": True}


ARCHITECTURE = Architecture(
    name="sana_sprint",
    title="SANA-Sprint",
    license="code Apache-2.0; weights under NVIDIA's licence in each repository (its terms are unverified), Gemma's "
    "terms for the text encoder",
    repositories=repositories("Sana_Sprint_0.6B_1024px_diffusers", "Sana_Sprint_1.6B_1024px_diffusers"),
    # cfg 1: one pass. The publisher's guidance of 4.5 is a condition, times guidance_embeds_scale.
    defaults=Defaults(steps=2, cfg=1.0, sampler="lcm", scheduler="published", width=1024, height=1024),
    signature=(*SIGNATURE, "time_embed.timestep_embedder.linear_1.weight", GUIDANCE),
    config_from_shapes=config_from_shapes,
    module=".ldm.sana.model:SanaTransformer2DModel",
    # TrigFlow is this flow in other coordinates, see ldm.sana.sampling; the network is given sigma itself.
    sampling=Sampling(
        prediction="velocity", shift=1.0, multiplier=1.0, sigmas=".ldm.sana.sampling:sprint_sigmas", guidance=4.5
    ),
    core_mistake="pixart_sigma",
    latent_format="dc_ae_f32c32",
    text_encoders=("gemma2",),
    autoencoder="dc_ae_f32c32",
    prompt=PROMPT,
    # As Sana's, of which it is a fine-tune.
    dtypes=("bfloat16", "float32"),
    memory_usage_factor=5.5,
    quantization=POLICY,
    layouts=(publisher_layout("time_embed"),),
    files={
        "diffusion_models": ("sana_sprint_1.6b_1024px.safetensors", "sana_sprint_0.6b_1024px.safetensors"),
        "text_encoders": ("gemma_2_2b_it.safetensors",),
        "vae": ("dc_ae_f32c32_sana.safetensors",),
    },
)
