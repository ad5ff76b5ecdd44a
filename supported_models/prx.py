"""PRX in the latent space of FLUX.1's autoencoder. Its siblings in another latent space and in pixels have cards."""
# By Photoroom, 1.2B; the siblings are prx_dc_ae and prx_pixel.
# Sources: the models' diffusers configurations, diffusers' PRXPipeline 0.42.1, Photoroom/PRX.

from __future__ import annotations

from typing import Any

from ..text_encoders.prompt import Prompt
from ._architecture import Architecture, Defaults, Sampling, Shapes
from ._downloads import shared
from ._prx import QUANTIZATION, SIGNATURE, TRAINER_LAYOUT, latent_config

CHANNELS, PATCH_SIZE = 16, 2


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    return latent_config(shapes, CHANNELS, PATCH_SIZE)


ARCHITECTURE = Architecture(
    name="prx",
    title="PRX",
    license="Apache-2.0 for the transformer; the terms of Gemma for the text encoder, of FLUX.1 for the autoencoder",
    repositories=(
        "Photoroom/prx-1024-t2i-beta",
        "Photoroom/prx-512-t2i-sft",
        "Photoroom/prx-512-t2i",
        "Photoroom/prx-512-t2i-sft-distilled",
        "Photoroom/prx-256-t2i-sft",
        "Photoroom/prx-256-t2i",
    ),
    # "simple" is the trainer's schedule: evenly spaced times, shifted once. diffusers shifts the low end twice.
    defaults=Defaults(steps=28, cfg=5.0, sampler="euler", scheduler="simple", width=1024, height=1024),
    variants={
        "distilled": Defaults(steps=8, cfg=1.0, sampler="euler", scheduler="simple", width=512, height=512),
        "512": Defaults(steps=28, cfg=5.0, sampler="euler", scheduler="simple", width=512, height=512),
        "256": Defaults(steps=28, cfg=5.0, sampler="euler", scheduler="simple", width=256, height=256),
    },
    signature=(*SIGNATURE, "img_in.weight"),
    config_from_shapes=config_from_shapes,
    module=".ldm.prx.model:PRXTransformer2DModel",
    sampling=Sampling(prediction="velocity", shift=3.0, multiplier=1.0),
    latent_format="flux",
    text_encoders=("t5gemma",),
    autoencoder="kl_flux",
    # The encoder was trained on cleaned, lower-case captions, and Gemma's tokens depend on the case.
    prompt=Prompt(max_length=256, clean="full"),
    # float16 is unverified for this model, so it is not offered.
    dtypes=("bfloat16", "float32"),
    # ComfyUI's estimate for FLUX (3.1 at 3072 channels, as many tokens per latent pixel) by the width; not measured.
    memory_usage_factor=1.8,
    quantization=QUANTIZATION,
    layouts=(TRAINER_LAYOUT,),
    files={
        "diffusion_models": (
            "prx_1024_t2i_beta.safetensors",
            "prx_512_t2i_sft.safetensors",
            "prx_512_t2i_sft_distilled.safetensors",
            "prx_512_t2i.safetensors",
            "prx_256_t2i_sft.safetensors",
            "prx_256_t2i.safetensors",
        ),
        "text_encoders": ("t5gemma_2b_2b_ul2_encoder.safetensors",),
        "vae": ("ae.safetensors",),
    },
    downloads=shared("ae.safetensors"),
)
