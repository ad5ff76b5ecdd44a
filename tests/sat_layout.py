"""CogView4's weights in the layout of THUDM's trainer."""

from __future__ import annotations

import torch

SAT_NAMES = (
    ("patch_embed.", "mixins.patch_embed."),
    ("time_condition_embed.timestep_embedder.linear_1.", "time_embed.0."),
    ("time_condition_embed.timestep_embedder.linear_2.", "time_embed.2."),
    ("time_condition_embed.condition_embedder.linear_1.", "label_emb.0.0."),
    ("time_condition_embed.condition_embedder.linear_2.", "label_emb.0.2."),
    ("norm_out.linear.", "mixins.final_layer.adaln.1."),
    ("proj_out.", "mixins.final_layer.linear."),
)
SAT_BLOCK_NAMES = (
    ("norm1.linear.", "mixins.adaln.adaln_modules.{}.1."),
    ("attn1.to_out.0.", "transformer.layers.{}.attention.dense."),
    ("ff.net.0.proj.", "transformer.layers.{}.mlp.dense_h_to_4h."),
    ("ff.net.2.", "transformer.layers.{}.mlp.dense_4h_to_h."),
)


def as_sat(state, layers):
    """The published checkpoint as THUDM's trainer writes it: what diffusers' converter does, backwards."""
    sat = {}
    names = list(SAT_NAMES)
    for i in range(layers):
        block = f"transformer_blocks.{i}."
        names += [(block + ours, theirs.format(i)) for ours, theirs in SAT_BLOCK_NAMES]
        for kind in ("weight", "bias"):
            fused = torch.cat([state[f"{block}attn1.to_{letter}.{kind}"] for letter in "qkv"])
            sat[f"transformer.layers.{i}.attention.query_key_value.{kind}"] = fused
    for ours, theirs in names:
        for kind in ("weight", "bias"):
            if ours + kind in state:
                sat[theirs + kind] = state[ours + kind]
            else:  # patch_embed. is a prefix of two layers
                for layer in ("proj.", "text_proj."):
                    sat[theirs + layer + kind] = state[ours + layer + kind]
    for kind in ("weight", "bias"):
        scale, shift = sat[f"mixins.final_layer.adaln.1.{kind}"].chunk(2)
        sat[f"mixins.final_layer.adaln.1.{kind}"] = torch.cat((shift, scale))
    return {"model.diffusion_model." + key: value for key, value in sat.items()}
