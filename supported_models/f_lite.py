"""F-Lite: trained on licensed pictures only."""
# By Freepik and fal, 10B and 7B.
# Sources: the model cards and checkpoints' shapes, and the published pipeline's numbers.

from __future__ import annotations

import math
from typing import Any

from ..quant.policy import CardPolicy
from ..text_encoders.prompt import Prompt
from ._architecture import Architecture, Defaults, KeyMap, Sampling, Shapes

HEAD_DIM = 256
REGISTERS = 16
ROPE_BUFFERS = r"^rope\.freqs_hw_(cos|sin)$"

# Trainers wrap the model, and the names of their checkpoints say so.
TRAINING_LAYOUT = KeyMap(
    name="training",
    marker="register_tokens",
    prefixes=("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."),
    rules=(),
    ignored=(ROPE_BUFFERS,),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Constructor arguments. The head size follows from the rotary tables where a file carries them, else it is the
    published models' constant; the rotary base is that of the published models."""
    dim, in_channels, patch_size, _ = shapes["patch_embed.patch_proj.weight"]
    inner = shapes["blocks.0.mlp.0.bias"][0]
    if tuple(shapes["register_tokens"]) != (1, REGISTERS, dim) or "positional_embedding" in shapes:
        return None
    if shapes["final_proj.bias"][0] != in_channels * patch_size**2:
        return None
    table = shapes.get("rope.freqs_hw_cos")
    head_dim = 2 * table[-1] if table else math.gcd(dim, HEAD_DIM)
    return {
        "in_channels": in_channels,
        "patch_size": patch_size,
        "hidden_size": dim,
        "depth": 1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("blocks.")),
        "num_heads": dim // head_dim,
        "mlp_ratio": inner / dim,
        "cross_attn_input_size": shapes["blocks.0.cross_attn.context_kv.weight"][1],
        "residual_v": "blocks.0.self_attn.lambda_param" in shapes,
        "train_bias_and_rms": "blocks.0.norm1.weight" in shapes,
    }


ARCHITECTURE = Architecture(
    name="f_lite",
    title="F-Lite",
    license="CreativeML Open RAIL-M",
    repositories=("Freepik/F-Lite", "Freepik/F-Lite-Texture", "Freepik/F-Lite-7B"),
    defaults=Defaults(steps=30, cfg=6.0, sampler="euler", scheduler="simple", width=1344, height=896),
    signature=(
        "register_tokens",
        "patch_embed.patch_proj.weight",
        "blocks.0.self_attn.qkv.weight",
        "blocks.0.cross_attn.context_kv.weight",
        "blocks.0.mlp.0.bias",
        "final_modulation.1.bias",
        "final_proj.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=".ldm.f_lite.model:FLiteTransformer",
    sampling=Sampling(
        prediction="-velocity",
        shift=4.287,  # 1344 x 896
        multiplier=1.0,
        shift_of_latent=".ldm.f_lite.sampling:shift_of_latent",
        times=".ldm.f_lite.sampling:times",
    ),
    latent_format="flux",
    text_encoders=("t5xxl",),
    autoencoder="kl_flux",
    # Padded to 512, and the padding is attended to in the encoder and in the transformer. hidden_states[-8], then the
    # encoder's final norm. No negative prompt means an embedding of zeros, not the encoded empty text.
    prompt=Prompt(
        max_length=512, min_tokens=512, eos=True, pad_token="<pad>", layers=(-8,), normed=True, empty="zeros"
    ),
    # float16 is unverified.
    dtypes=("bfloat16", "float32"),
    # ComfyUI's estimate for FLUX (3.1), which has the same width, by what both have allocated at most during a pass,
    # counted on a CPU in bfloat16: 39 bytes per token and channel here, 62 there. Not measured on a GPU.
    memory_usage_factor=1.9,
    quantization=CardPolicy(
        blocks=(
            "blocks.*.self_attn.qkv",
            "blocks.*.self_attn.proj",
            "blocks.*.cross_attn.q",
            "blocks.*.cross_attn.context_kv",
            "blocks.*.cross_attn.proj",
            "blocks.*.mlp.0",
            "blocks.*.mlp.2",
        ),
        never=(
            ("blocks.*.adaLN_modulation.1", "modulation: a third of all weights, but every token depends on it"),
            ("final_modulation.1", "modulation of the output"),
            ("time_embed.*", "the timestep enters here, in one row"),
            ("patch_embed.patch_proj", "a convolution, the first layer"),
            ("final_proj", "the last layer, straight into the latent"),
            ("register_tokens", "tokens, not a layer"),
        ),
    ),
    layouts=(TRAINING_LAYOUT,),
    ignored=(ROPE_BUFFERS,),
    files={
        "diffusion_models": ("f_lite_10b.safetensors", "f_lite_texture_10b.safetensors", "f_lite_7b.safetensors"),
        "text_encoders": ("t5xxl_fp16.safetensors", "t5xxl_fp8_e4m3fn_scaled.safetensors"),
        "vae": ("ae.safetensors",),
    },
)
