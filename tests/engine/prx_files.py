"""A tiny PRX of the latent kind with a tiny T5Gemma: another prediction, latent and prompt than PRXPixel's."""

from __future__ import annotations

from pathlib import Path

import comfyui_files as files
from safetensors.torch import save_file

DIT = {"in_channels": 16, "patch_size": 2, "context_in_dim": 48, "hidden_size": 64, "num_heads": 4, "depth": 2}
TEXT = {
    "vocab_size": files.TEXT["vocab_size"],
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_offset": True,
    "embed_scale": 48**0.5,
    "attn_logit_softcapping": 50.0,
    "block_norms": "t5gemma",
    "causal": False,
}


def write(models: Path) -> None:
    """Into ComfyUI's models folder."""
    from nativedit.text_encoders.language_model import LanguageModel

    dit = files.dit_state(DIT, seed=5)
    save_file(dit, models / "diffusion_models" / "tiny_prx.safetensors", files.header("transformer", DIT))
    text = {**files.random_state(LanguageModel(**TEXT, device="meta"), 6), **files.tokenizer_tensor()}
    header = files.header("text_encoder", {"family": "t5gemma", **TEXT})
    save_file(text, models / "text_encoders" / "tiny_t5gemma.safetensors", header)
