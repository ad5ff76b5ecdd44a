"""A tiny CogView4 with random weights, as the files that people have: transformer, GLM-4 with its tokenizer, KL VAE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfyui_files as files
import torch
from comfyui_graphs import Graph, node
from safetensors.torch import save_file
from support import ROOT

DIT = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 32,
    "condition_dim": 16,
}
SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<unk>"]
GLM = {
    "vocab_size": len(SPECIAL) + len(files.WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "o_proj_bias": False,
    "fused_gate_up": True,
    "partial_rotary_factor": 0.5,
    "rope_interleaved": True,
}
# Wide enough for every quantization format, with the published head sizes.
WIDE_DIT = DIT | {"attention_head_dim": 128, "num_attention_heads": 2, "text_embed_dim": 256, "time_embed_dim": 64}
WIDE_GLM = GLM | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
NAMES = {
    "diffusion_models": "cogview4_6b.safetensors",
    "text_encoders": "glm_4_9b.safetensors",
    "vae": "cogview4_vae.safetensors",
}
PROMPT = "a red circle above a blue square"


def dit_state(seed: int = 21, config: dict[str, Any] = DIT) -> dict[str, torch.Tensor]:
    from nativedit.ldm.cogview4.model import CogView4Transformer2DModel

    return files.random_state(CogView4Transformer2DModel(**config, device="meta"), seed)


def text_state(seed: int = 22, config: dict[str, Any] = GLM) -> dict[str, torch.Tensor]:
    from nativedit.text_encoders.language_model import LanguageModel

    return files.random_state(LanguageModel(**config, device="meta"), seed)


def vae_state(seed: int = 23) -> dict[str, torch.Tensor]:
    return files.random_state(files.autoencoder("kl", device="meta"), seed)


def tokenizer_json() -> bytes:
    """One token per word, after the two tokens that every text of GLM-4 begins with."""
    tokenizer = json.loads(files.tokenizer_json())
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *files.WORDS])}
    tokenizer["model"]["vocab"] = vocabulary
    marks = ("single_word", "lstrip", "rstrip", "normalized")
    tokenizer["added_tokens"] = [
        {"id": vocabulary[token], "content": token, "special": True, **dict.fromkeys(marks, False)}
        for token in SPECIAL[:3]
    ]
    before = [{"SpecialToken": {"id": token, "type_id": 0}} for token in SPECIAL[1:3]]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [*before, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]} for token in SPECIAL[1:3]
        },
    }
    return json.dumps(tokenizer).encode()


def write(models: Path, dit: dict[str, Any] = DIT, glm: dict[str, Any] = GLM) -> None:
    """Into ComfyUI's models folder."""
    tokenizer = torch.frombuffer(bytearray(tokenizer_json()), dtype=torch.uint8).clone()
    tensors = {
        "diffusion_models": (dit_state(config=dit), files.header("transformer", dit)),
        "text_encoders": (
            {**text_state(config=glm), "tokenizer_json": tokenizer},
            files.header("text_encoder", {"family": "glm4", **glm}),
        ),
        "vae": (vae_state(), {"format": "pt"}),
    }
    for folder, (state, metadata) in tensors.items():
        (models / folder).mkdir(parents=True, exist_ok=True)
        save_file(state, models / folder / NAMES[folder], metadata)


def example() -> Graph:
    """The example workflow up to its latent, small; the node `save` saves that."""
    made = json.loads((ROOT / "example_workflows" / "api" / "cogview4.json").read_text(encoding="utf-8"))
    made = {key: value for key, value in made.items() if key in "123456"}
    made["5"]["inputs"] |= {"width": 96, "height": 64}
    made["6"]["inputs"]["steps"] = 3
    return {**made, "save": node("SaveLatent", samples=["6", 0], filename_prefix="latents/cogview4_example")}


def graph(*, size: tuple[int, int] = (96, 64), sampler: dict[str, Any] | None = None, negative: str = "") -> Graph:
    """From files to a picture, by our nodes; `sampler` is the node that samples, `save` saves the latent. size: width,
    height; sampler: widgets of NativeDiTSample."""
    links = {"model": ["model", 0], "positive": ["positive", 0], "negative": ["negative", 0]}
    return {
        "model": node(
            "NativeDiTLoadDiffusionModel",
            file=NAMES["diffusion_models"],
            architecture="auto",
            precision="as stored",
            policy="card",
        ),
        "clip": node(
            "NativeDiTLoadTextEncoder", file=NAMES["text_encoders"], architecture="cogview4", precision="as stored"
        ),
        "vae": node("NativeDiTLoadVAE", file=NAMES["vae"], precision="float32"),
        "positive": node("CLIPTextEncode", text=PROMPT, clip=["clip", 0]),
        "negative": node("CLIPTextEncode", text=negative, clip=["clip", 0]),
        "latent": node("NativeDiTEmptyLatent", model=["model", 0], width=size[0], height=size[1], batch_size=1),
        "sampler": node(
            "NativeDiTSample",
            **links,
            latent_image=["latent", 0],
            **{
                "seed": 7,
                "steps": 4,
                "cfg": -1.0,
                "sampler_name": "auto",
                "scheduler": "auto",
                "shift": 0.0,
                "denoise": 1.0,
                **(sampler or {}),
            },
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="latents/cogview4"),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "picture": node("SaveImage", images=["decode", 0], filename_prefix="cogview4"),
    }
