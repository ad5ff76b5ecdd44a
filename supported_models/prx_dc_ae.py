"""PRX in the latent space of DC-AE, with a token for each latent pixel. All else is as for its sibling.

Which autoencoder a file wants shows in the width of its tokens alone.
"""
# By Photoroom, 1.2B; DC-AE has 32 channels. Sources: the models' diffusers configurations.

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import prx
from ._architecture import Defaults, Shapes
from ._prx import latent_config

CHANNELS, PATCH_SIZE = 32, 1


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    return latent_config(shapes, CHANNELS, PATCH_SIZE)


ARCHITECTURE = replace(
    prx.ARCHITECTURE,
    name="prx_dc_ae",
    title="PRX (DC-AE)",
    license="Apache-2.0 (transformer), Gemma's terms (text encoder), the VAE's own terms (unverified)",
    repositories=(
        "Photoroom/prx-512-t2i-dc-ae-sft",
        "Photoroom/prx-512-t2i-dc-ae",
        "Photoroom/prx-512-t2i-dc-ae-sft-distilled",
    ),
    defaults=Defaults(steps=28, cfg=5.0, sampler="euler", scheduler="simple", width=512, height=512),
    variants={"distilled": prx.ARCHITECTURE.variants["distilled"]},
    config_from_shapes=config_from_shapes,
    latent_format="dc_ae_f32c32",
    autoencoder="dc_ae_f32c32",
    # Four times as many tokens per latent pixel as prx.
    memory_usage_factor=7.2,
    files={
        "diffusion_models": (
            "prx_512_t2i_dc_ae_sft.safetensors",
            "prx_512_t2i_dc_ae_sft_distilled.safetensors",
            "prx_512_t2i_dc_ae.safetensors",
        ),
        "text_encoders": prx.ARCHITECTURE.files["text_encoders"],
        "vae": ("dc_ae_f32c32_sana.safetensors",),
    },
    downloads={},
)
