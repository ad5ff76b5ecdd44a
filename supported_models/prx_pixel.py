"""PRXPixel: pixels in, clean picture out, no autoencoder."""
# By Photoroom, 7B.
# Sources: the model's diffusers configuration, diffusers' PRXPixelPipeline 0.42.1, Photoroom/PRX.

from __future__ import annotations

import math
from typing import Any

from ..text_encoders.prompt import Prompt
from ._architecture import Architecture, Defaults, Sampling, Shapes
from ._prx import QUANTIZATION, SIGNATURE, TRAINER_LAYOUT, sizes


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """The pixel kind has 3 channels, so the patch size follows from the width of a token."""
    patch_dim = shapes["final_layer.linear.bias"][0]
    patch_size = math.isqrt(patch_dim // 3)
    if patch_dim != 3 * patch_size**2:
        return None
    return {
        "in_channels": 3,
        "patch_size": patch_size,
        "bottleneck_size": shapes["img_in.0.bias"][0],
        "resolution_embeds": True,
        **sizes(shapes),
    }


ARCHITECTURE = Architecture(
    name="prx_pixel",
    title="PRXPixel",
    license="Apache-2.0 (family; the text of this model's card is unverified)",
    repositories=("Photoroom/prxpixel-t2i",),
    defaults=Defaults(steps=28, cfg=5.0, sampler="euler", scheduler="simple", width=1024, height=1024),
    signature=(*SIGNATURE, "img_in.0.weight", "resolution_embedder.mlp.in_layer.weight"),
    config_from_shapes=config_from_shapes,
    module=".ldm.prx.model:PRXTransformer2DModel",
    sampling=Sampling(prediction="x0", shift=3.0, multiplier=1.0, noise_scale=2.0, x0_sigma_floor=0.05),
    latent_format="rgb",
    text_encoders=("qwen3_vl",),
    text_encoder_width=2048,
    autoencoder="pixel_space",
    prompt=Prompt(max_length=256, clean="light"),
    # fp16 is unverified for this model, so it is not offered.
    dtypes=("bfloat16", "float32"),
    # A latent pixel is a picture pixel here; ComfyUI's pixel models use 0.033 to 0.044.
    memory_usage_factor=0.04,
    quantization=QUANTIZATION,
    layouts=(TRAINER_LAYOUT,),
    files={
        "diffusion_models": ("prxpixel_t2i.safetensors",),
        "text_encoders": ("qwen3_vl_embedding_2b.safetensors",),
    },
)
