"""A tiny F-Lite with random weights, as the files that people have: transformer, T5 v1.1 with its tokenizer."""

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
    "in_channels": 16,
    "patch_size": 2,
    "hidden_size": 64,
    "depth": 3,
    "num_heads": 4,
    "mlp_ratio": 4.0,
    "cross_attn_input_size": 32,
    "residual_v": True,
    "train_bias_and_rms": False,
    "rope_base": 10000,
}
SPECIAL = ["<pad>", "</s>", "<unk>"]
# Ten layers, because F-Lite reads the eighth state from the end.
T5 = {
    "vocab_size": len(SPECIAL) + len(files.WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "head_dim": 8,
}
# Wide enough for every quantization format, with the published head sizes.
WIDE_DIT = DIT | {"hidden_size": 256, "num_heads": 1, "cross_attn_input_size": 256, "depth": 2}
WIDE_T5 = T5 | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 9}
NAMES = {"diffusion_models": "f_lite_10b.safetensors", "text_encoders": "t5xxl_fp16.safetensors"}
PROMPT = "a red circle above a blue square"


def dit_state(seed: int = 31, config: dict[str, Any] = DIT) -> dict[str, torch.Tensor]:
    from nativedit.ldm.f_lite.model import FLiteTransformer

    return files.random_state(FLiteTransformer(**config, device="meta"), seed)


def text_state(seed: int = 32, config: dict[str, Any] = T5) -> dict[str, torch.Tensor]:
    from nativedit.text_encoders.t5 import T5Encoder

    return files.random_state(T5Encoder(**config, device="meta"), seed)


def token_ids(text: str) -> list[int]:
    """What the published pipeline gives T5: the words, the end token, padding up to 512."""
    ids = [len(SPECIAL) + files.WORDS.index(word) for word in text.split()] + [SPECIAL.index("</s>")]
    return ids + [SPECIAL.index("<pad>")] * (512 - len(ids))


def tokenizer_tensors() -> dict[str, torch.Tensor]:
    tokenizer = json.loads(files.tokenizer_json())
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *files.WORDS])}
    tokenizer["model"]["vocab"] = vocabulary
    marks = ("single_word", "lstrip", "rstrip", "normalized")
    tokenizer["added_tokens"] = [
        {"id": vocabulary[token], "content": token, "special": True, **dict.fromkeys(marks, False)}
        for token in SPECIAL[:2]
    ]
    config = json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}).encode()
    named = {"tokenizer_json": json.dumps(tokenizer).encode(), "tokenizer_config": config}
    return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8).clone() for name, data in named.items()}


def write(models: Path, dit: dict[str, Any] = DIT, t5: dict[str, Any] = T5) -> None:
    """Into ComfyUI's models folder."""
    tensors = {
        "diffusion_models": (dit_state(config=dit), files.header("transformer", dit)),
        "text_encoders": ({**text_state(config=t5), **tokenizer_tensors()}, {"format": "pt"}),
    }
    for folder, (state, metadata) in tensors.items():
        (models / folder).mkdir(parents=True, exist_ok=True)
        save_file(state, models / folder / NAMES[folder], metadata)


def example() -> Graph:
    """The example workflow up to its latent, small; the node `save` saves that."""
    made = json.loads((ROOT / "example_workflows" / "api" / "f_lite.json").read_text(encoding="utf-8"))
    made = {key: value for key, value in made.items() if key in "123456"}
    made["5"]["inputs"] |= {"width": 96, "height": 64}
    made["6"]["inputs"]["steps"] = 3
    return {**made, "save": node("SaveLatent", samples=["6", 0], filename_prefix="latents/f_lite_example")}


def graph(
    *,
    size: tuple[int, int] = (96, 64),
    negative: str = "",
    projected: bool = False,
    sampler: dict[str, Any] | None = None,
) -> Graph:
    """From files to a latent, by our nodes. size: width, height; projected: adaptive projected guidance; sampler:
    widgets of NativeDiTSample."""
    auto = {"sampler_name": "auto", "scheduler": "auto", "shift": 0.0, "denoise": 1.0}
    made = {
        "model": node("UNETLoader", unet_name=NAMES["diffusion_models"], weight_dtype="default"),
        "clip": node(
            "NativeDiTLoadTextEncoder", file=NAMES["text_encoders"], architecture="f_lite", precision="as stored"
        ),
        "positive": node("CLIPTextEncode", text=PROMPT, clip=["clip", 0]),
        "negative": node("CLIPTextEncode", text=negative, clip=["clip", 0]),
        "latent": node("NativeDiTEmptyLatent", model=["model", 0], width=size[0], height=size[1], batch_size=1),
        "sampler": node(
            "NativeDiTSample",
            model=["model", 0],
            positive=["positive", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            **{"seed": 7, "steps": 4, "cfg": -1.0, **auto, **(sampler or {})},
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="latents/f_lite"),
    }
    if projected:
        made["guided"] = node("NativeDiTAdaptiveProjectedGuidance", model=["model", 0], limit=0.03)
        made["sampler"]["inputs"]["model"] = ["guided", 0]
    return made
