"""Two kinds of ERNIE-Image, one of them fast. ComfyUI's core loads both."""
# ERNIE-Image and ERNIE-Image-Turbo, by Baidu, 8B. ComfyUI and diffusers name every weight alike.
# Sources: ComfyUI 0.33.0 (class, detection, dtypes), diffusers 0.42.1 (class), the file names of
# comfyui-workflow-templates-json 0.1.123.

from __future__ import annotations

from typing import Any

from ..quant.policy import CardPolicy
from ._architecture import Architecture, Shapes
from ._downloads import hub, shared
from ._two_way import WEIGHT, WEIGHT_BIAS, Rule, TwoWayMap, depth

_MATRICES = (
    *(f"self_attention.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "linear_fc2")),
)
_NORMS = ("adaLN_sa_ln", "adaLN_mlp_ln", "self_attention.norm_q", "self_attention.norm_k")
_WITH_BIAS = (
    "x_embedder.proj",
    "time_embedding.linear_1",
    "time_embedding.linear_2",
    "adaLN_modulation.1",
    "final_norm.linear",
    "final_linear",
)

DIFFUSERS = TwoWayMap(
    name="diffusers",
    marker="",
    rules=(
        *(Rule(name, name, WEIGHT_BIAS) for name in _WITH_BIAS),
        # a text encoder as wide as the model needs no projection
        Rule("text_proj", "text_proj", WEIGHT, group="text"),
        *(Rule(f"layers.#.{name}", f"layers.#.{name}", WEIGHT) for name in (*_MATRICES, *_NORMS)),
    ),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Arguments of diffusers' class."""
    width, head_dim = shapes["x_embedder.proj.bias"][0], shapes["layers.0.self_attention.norm_q.weight"][0]
    embed = shapes["x_embedder.proj.weight"]
    return {
        "hidden_size": width,
        "num_attention_heads": width // head_dim,
        "num_layers": depth(shapes, "layers"),
        "ffn_hidden_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "in_channels": embed[1],
        "out_channels": shapes["final_linear.bias"][0] // embed[2] ** 2,
        "patch_size": embed[2],
        "text_in_dim": shapes["text_proj.weight"][1] if "text_proj.weight" in shapes else width,
    }


_FILES = ("ernie-image-turbo.safetensors", "ernie-image.safetensors")

ARCHITECTURE = Architecture(
    name="ernie_image",
    title="ERNIE-Image",
    license="",
    repositories=("baidu/ERNIE-Image",),
    defaults=None,
    signature=(
        "x_embedder.proj.weight",
        "x_embedder.proj.bias",
        "layers.0.adaLN_sa_ln.weight",
        "layers.0.self_attention.norm_q.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.linear_fc2.weight",
        "final_linear.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=None,
    sampling=None,
    latent_format=None,
    dtypes=("bfloat16", "float32"),
    quantization=CardPolicy(
        blocks=tuple(f"layers.*.{name}" for name in _MATRICES),
        never=(
            ("x_embedder.proj", "the first layer: 128 inputs"),
            ("text_proj", "the text's only projection"),
            ("time_embedding.*", "the timestep enters here, in one row"),
            ("adaLN_modulation.1", "modulation, shared by all blocks"),
            ("final_*", "the last layer, straight into the latent, and its modulation"),
        ),
    ),
    layouts=(DIFFUSERS,),
    diffusers_class="ErnieImageTransformer2DModel",
    files={
        "diffusion_models": _FILES,
        "text_encoders": ("ministral-3-3b.safetensors",),
        "vae": ("flux2-vae.safetensors",),
    },
    downloads={
        **hub("Comfy-Org/ERNIE-Image", *_FILES, folder="diffusion_models"),
        **shared("ministral-3-3b.safetensors", "flux2-vae.safetensors"),
    },
)
