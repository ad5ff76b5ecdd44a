"""Sana and SANA-1.5, in two sizes each and for pictures from small to very large."""
# Sana (0.6B, 1.6B; 512 to 4K) and SANA-1.5 (1.6B, 4.8B), by NVIDIA and MIT HAN Lab.
# Sources: the models' diffusers configurations, diffusers' SanaPipeline 0.42.1, arXiv 2410.10629 and 2501.18427.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ._architecture import Architecture, Defaults, Sampling, Shapes
from ._sana import GUIDANCE, POLICY, PROMPT, SIGNATURE, publisher_layout, repositories, sizes


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """The position table of 2K and 4K models is seen in the publisher's layout only; in ours a config entry (or the
    folder's config.json) has to name it."""
    return None if GUIDANCE in shapes else sizes(shapes)


SAMPLING = Sampling(prediction="velocity", shift=3.0, multiplier=1000.0)


def sampling_of_config(config: Mapping[str, Any]) -> Sampling:
    """The 4K model, told by its position table, was trained with shift 6."""
    return replace(SAMPLING, shift=6.0) if config.get("sample_size") == 128 else SAMPLING


def _settings(size: int) -> Defaults:
    return Defaults(steps=20, cfg=4.5, sampler="dpmpp_2m", scheduler="simple", width=size, height=size)


ARCHITECTURE = Architecture(
    name="sana",
    title="Sana and SANA-1.5",
    license="code Apache-2.0; weights under NVIDIA's licence in each repository (its terms are unverified), Gemma's "
    "terms for the text encoder",
    repositories=repositories(
        "Sana_600M_512px_diffusers",
        "Sana_600M_1024px_diffusers",
        "Sana_1600M_512px_diffusers",
        "Sana_1600M_1024px_diffusers",
        "Sana_1600M_1024px_MultiLing_diffusers",
        "Sana_1600M_1024px_BF16_diffusers",
        "Sana_1600M_2Kpx_BF16",
        "Sana_1600M_4Kpx_BF16",
        "SANA1.5_1.6B_1024px_diffusers",
        "SANA1.5_4.8B_1024px_diffusers",
    ),
    defaults=_settings(1024),
    variants={"512px": _settings(512), "2kpx": _settings(2048), "4kpx": _settings(4096)},
    signature=(*SIGNATURE, "time_embed.emb.timestep_embedder.linear_1.weight"),
    config_from_shapes=config_from_shapes,
    module=".ldm.sana.model:SanaTransformer2DModel",
    sampling=SAMPLING,
    sampling_of_config=sampling_of_config,
    # By ``t_block.1.weight`` of the publisher's layout.
    core_mistake="pixart_sigma",
    latent_format="dc_ae_f32c32",
    text_encoders=("gemma2",),
    autoencoder="dc_ae_f32c32",
    prompt=PROMPT,
    # float16 overflows on the text encoder's large outputs.
    dtypes=("bfloat16", "float32"),
    # A token keeps about five times 5 * 2240 channels of two bytes in the feed-forward; ComfyUI's unit is 21 kB per
    # latent pixel. Not measured.
    memory_usage_factor=5.5,
    quantization=POLICY,
    layouts=(publisher_layout("time_embed.emb"),),
    files={
        "diffusion_models": ("sana_1600m_1024px.safetensors", "sana1.5_1.6b_1024px.safetensors"),
        "text_encoders": ("gemma_2_2b_it.safetensors",),
        "vae": ("dc_ae_f32c32_sana.safetensors",),
    },
)
