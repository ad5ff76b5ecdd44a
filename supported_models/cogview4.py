"""CogView4: bilingual, writes Chinese in pictures."""
# By Z.ai / THUDM, 6B.
# Sources: THUDM/CogView4-6B's model card and scheduler configuration, diffusers' CogView4Pipeline and converter 0.42.1.

from __future__ import annotations

import math
from typing import Any

from ..quant.policy import CardPolicy
from ..text_encoders.prompt import Prompt
from ._architecture import Architecture, Defaults, KeyMap, Sampling, Shapes

PATCH_SIZE = 2
HEAD_DIM = 128
# CogView3-Plus has the same keys; its 2560 channels are 64 heads of 40, and it is another kind of diffusion.
COGVIEW3_PLUS_WIDTH = 2560

# THUDM's own (SAT) checkpoints, as the converter in diffusers reads them.
SAT_LAYOUT = KeyMap(
    name="sat",
    marker="mixins.patch_embed.text_proj.weight",
    prefixes=("", "model.diffusion_model."),
    rules=(
        (r"^mixins\.patch_embed\.", "patch_embed."),
        (r"^time_embed\.0\.", "time_condition_embed.timestep_embedder.linear_1."),
        (r"^time_embed\.2\.", "time_condition_embed.timestep_embedder.linear_2."),
        (r"^label_emb\.0\.0\.", "time_condition_embed.condition_embedder.linear_1."),
        (r"^label_emb\.0\.2\.", "time_condition_embed.condition_embedder.linear_2."),
        (r"^mixins\.adaln\.adaln_modules\.(\d+)\.1\.", r"transformer_blocks.\1.norm1.linear."),
        (r"^transformer\.layers\.(\d+)\.attention\.dense\.", r"transformer_blocks.\1.attn1.to_out.0."),
        (r"^transformer\.layers\.(\d+)\.attention\.query_key_value\.", r"transformer_blocks.\1.attn1.to_qkv."),
        (r"^transformer\.layers\.(\d+)\.mlp\.dense_h_to_4h\.", r"transformer_blocks.\1.ff.net.0.proj."),
        (r"^transformer\.layers\.(\d+)\.mlp\.dense_4h_to_h\.", r"transformer_blocks.\1.ff.net.2."),
        (r"^mixins\.final_layer\.adaln\.1\.", "norm_out.linear."),
        (r"^mixins\.final_layer\.linear\.", "proj_out."),
    ),
    fused=((r"\.attn1\.to_qkv\.", (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v.")),),
    swapped=(r"^norm_out\.linear\.",),
)


def config_from_shapes(shapes: Shapes) -> dict[str, Any] | None:
    """Constructor arguments; the head size and the patch size are constants of every published model."""
    dim = shapes["patch_embed.proj.bias"][0]
    patch_dim, out_dim = shapes["patch_embed.proj.weight"][1], shapes["proj_out.bias"][0]
    embed_dim = shapes["time_condition_embed.timestep_embedder.linear_2.bias"][0]
    modulation = shapes["transformer_blocks.0.norm1.linear.bias"][0]
    if modulation != 12 * dim or patch_dim % PATCH_SIZE**2 or out_dim % PATCH_SIZE**2 or dim == COGVIEW3_PLUS_WIDTH:
        return None
    head_dim = math.gcd(dim, HEAD_DIM)  # a width that 128 does not divide has no published answer
    return {
        "patch_size": PATCH_SIZE,
        "in_channels": patch_dim // PATCH_SIZE**2,
        "out_channels": out_dim // PATCH_SIZE**2,
        "num_layers": 1 + max(int(key.split(".")[1]) for key in shapes if key.startswith("transformer_blocks.")),
        "attention_head_dim": head_dim,
        "num_attention_heads": dim // head_dim,
        "text_embed_dim": shapes["patch_embed.text_proj.weight"][1],
        "time_embed_dim": embed_dim,
        "condition_dim": shapes["time_condition_embed.condition_embedder.linear_1.weight"][1] // 6,
    }


ARCHITECTURE = Architecture(
    name="cogview4",
    title="CogView4",
    license="Apache-2.0",
    repositories=("THUDM/CogView4-6B", "zai-org/CogView4-6B"),
    # "normal" spaces the model's timesteps evenly, which is the published schedule up to its rounding down.
    defaults=Defaults(steps=50, cfg=3.5, sampler="euler", scheduler="normal", width=1024, height=1024),
    signature=(
        "patch_embed.proj.weight",
        "patch_embed.text_proj.weight",
        "time_condition_embed.timestep_embedder.linear_2.bias",
        "time_condition_embed.condition_embedder.linear_1.weight",
        "transformer_blocks.0.norm1.linear.bias",
        "transformer_blocks.0.attn1.to_q.weight",
        "proj_out.bias",
    ),
    config_from_shapes=config_from_shapes,
    module=".ldm.cogview4.model:CogView4Transformer2DModel",
    sampling=Sampling(
        prediction="velocity",
        shift=3.25,
        multiplier=1000.0,
        shift_of_latent=".ldm.cogview4.sampling:shift_of_latent",
        timestep_before_shift=True,
        times=".ldm.cogview4.sampling:times",
    ),
    latent_format="cogview4",
    text_encoders=("glm4",),
    autoencoder="kl_cogview4",
    # The raw prompt; the padding is attended to. hidden_states[-2]: the last layer and the final norm are not used.
    prompt=Prompt(max_length=1024, pad_multiple=16, padding_side="left", pad_token="<|endoftext|>", layers=(-2,)),
    conditions=("original_size", "target_size", "crop_coords"),
    # float16 overflows to black pictures, says the model card.
    dtypes=("bfloat16", "float32"),
    # ComfyUI's estimate for FLUX (3.1), by what both have allocated at most during a pass, counted on a CPU in
    # bfloat16: 31 bytes per token and channel here, 62 there, at 4096 and 3072 channels. Not measured on a GPU.
    memory_usage_factor=2.1,
    quantization=CardPolicy(
        blocks=(
            "transformer_blocks.*.attn1.to_[qkv]",
            "transformer_blocks.*.attn1.to_out.0",
            "transformer_blocks.*.ff.net.0.proj",
            "transformer_blocks.*.ff.net.2",
        ),
        never=(
            ("transformer_blocks.*.norm1.linear", "modulation: 512 inputs, every token depends on it"),
            ("norm_out.*", "modulation of the output"),
            ("time_condition_embed.*", "the timestep and the sizes enter here, in one row"),
            ("patch_embed.*", "the first layer: 64 inputs, and the text's only projection"),
            ("proj_out", "the last layer, straight into the latent"),
        ),
    ),
    layouts=(SAT_LAYOUT,),
    files={
        "diffusion_models": ("cogview4_6b.safetensors",),
        "text_encoders": ("glm_4_9b.safetensors",),
        "vae": ("cogview4_vae.safetensors",),
    },
)
