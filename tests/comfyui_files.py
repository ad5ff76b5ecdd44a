"""Tiny models with random weights, in the layouts that people have: what the tests in a real ComfyUI load."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "model.diffusion_model."
WORDS = ["a", "the", "red", "green", "blue", "circle", "square", "on", "above", "below", "and", "small", "background"]

DIT = {
    "in_channels": 3,
    "patch_size": 8,
    "context_in_dim": 32,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 3,
    "bottleneck_size": 16,
    "resolution_embeds": True,
}
# Not what shapes and card give: axes that are not half a head each, another theta.
ODD = {**DIT, "axes_dim": (8, 24), "theta": 500}
TEXT = {
    "vocab_size": len(WORDS) + 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "qk_norm": True,
    "rope_theta": 5_000_000.0,
}
# ComfyUI's own Qwen3 0.6B, as small as the probe pack makes it.
QWEN3 = {
    **TEXT,
    "vocab_size": 1024,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
}
ODD_TEXT = {**TEXT, "rope_theta": 300.0, "rms_norm_eps": 1e-3}


# Of the kinds that ComfyUI has no module for: CogView4's autoencoder, and Sana's.
KL = {"block_out_channels": (32, 32, 64, 64), "layers_per_block": 1, "mid_block_add_attention": False}
DC_AE = {
    "encoder_block_types": ("ResBlock",) * 4 + ("EfficientViTBlock",) * 2,
    "decoder_block_types": ("ResBlock",) * 4 + ("EfficientViTBlock",) * 2,
    "encoder_block_out_channels": (32, 32, 32, 32, 64, 64),
    "decoder_block_out_channels": (32, 32, 32, 32, 64, 64),
    "encoder_layers_per_block": (1,) * 6,
    "decoder_layers_per_block": (1,) * 6,
    "encoder_qkv_multiscales": ((), (), (), (), (5,), (5,)),
    "decoder_qkv_multiscales": ((), (), (), (), (5,), (5,)),
}


def autoencoder(kind: str, **place: Any) -> torch.nn.Module:
    """kind: "kl" or "dc_ae"."""
    from nativedit.autoencoders.dc_ae import AutoencoderDC
    from nativedit.autoencoders.kl import AutoencoderKL

    return (AutoencoderKL(**KL, **place) if kind == "kl" else AutoencoderDC(**DC_AE, **place)).eval()


def publishers_dc_ae(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A DC-AE's weights as its publisher stores them: wrapped layers, 1x1 convolutions, one matrix for q, k and v."""
    names = (
        (r"^encoder\.conv_in\.", "encoder.project_in.conv."),
        (r"^decoder\.conv_in\.", "decoder.project_in.main.conv."),
        (r"^encoder\.conv_out\.", "encoder.project_out.main.op_list.0.conv."),
        (r"^decoder\.norm_out\.", "decoder.project_out.op_list.0."),
        (r"^decoder\.conv_out\.", "decoder.project_out.op_list.2.conv."),
        (r"^(en|de)coder\.(?:down|up)_blocks\.(\d+)\.(\d+)\.", r"\1coder.stages.\2.op_list.\3."),
        (r"(\d)\.attn\.", r"\1.context_module.main."),
        (r"(\d)\.conv_out\.norm\.", r"\1.local_module.main.point_conv.norm."),
        (r"(\d)\.conv_out\.conv_(\w+)\.", r"\1.local_module.main.\2_conv.conv."),
        (r"to_qkv_multiscale\.(\d+)\.proj_in\.", r"aggreg.\1.0."),
        (r"to_qkv_multiscale\.(\d+)\.proj_out\.", r"aggreg.\1.1."),
        (r"main\.to_out\.", "main.proj.conv."),
        (r"main\.norm_out\.", "main.proj.norm."),
        (r"(stages\.\d+\.op_list\.\d+)\.conv\.", r"\1.main.conv.conv."),
        (r"(op_list\.\d+)\.(conv[12])\.", r"\1.main.\2.conv."),
        (r"(op_list\.\d+)\.norm\.", r"\1.main.conv2.norm."),
    )
    stored = {}
    for key, value in state.items():
        if re.search(r"\.to_[kv]\.", key):
            continue
        if ".to_q." in key:
            value = torch.cat([state[key.replace(".to_q.", f".to_{part}.")] for part in "qkv"])
        for pattern, replacement in (*names, (r"main\.to_q\.", "main.qkv.conv.")):
            key = re.sub(pattern, replacement, key)
        wide = key.endswith(("qkv.conv.weight", "proj.conv.weight"))
        stored[key] = value[:, :, None, None] if wide else value
    return stored


def random_state(module: torch.nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Weights of a size that keeps activations near 1, norms near 1, the same for every dtype but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, value in module.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim > 1:
            tensor = noise * value[0].numel() ** -0.5
        else:
            tensor = 1 + 0.1 * noise if "norm" in key and key.endswith("weight") else 0.1 * noise
        state[key] = tensor.to(dtype)
    return state


def dit_state(config: dict[str, Any] = DIT, seed: int = 1, dtype: torch.dtype = torch.float32):
    from nativedit.ldm.prx.model import PRXTransformer2DModel

    return random_state(PRXTransformer2DModel(**config, device="meta"), seed, dtype)


def text_state(
    seed: int = 2, dtype: torch.dtype = torch.float32, config: dict[str, Any] = TEXT
) -> dict[str, torch.Tensor]:
    from nativedit.text_encoders.language_model import LanguageModel

    return random_state(LanguageModel(**config, device="meta"), seed, dtype)


def tokenizer_json() -> bytes:
    """One token per word, none for an empty prompt."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", *WORDS])}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": 0,
                    "content": "<pad>",
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "normalizer": {"type": "Lowercase"},
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
        }
    ).encode()


def tokenizer_tensor() -> dict[str, torch.Tensor]:
    return {"tokenizer_json": torch.frombuffer(bytearray(tokenizer_json()), dtype=torch.uint8).clone()}


# What nothing in a tiny file tells: whose prompts its text encoder encodes (Qwen3-VL is read by several models).
FOR_PRX_PIXEL = {"format": "pt", "nativedit.architecture": "prx_pixel"}


def header(part: str, config: dict[str, Any]) -> dict[str, str]:
    return {"format": "pt", "config": json.dumps({part: config})}


def write_models(models: Path) -> None:
    """Everything the server tests load, into ComfyUI's models folder."""
    dit, text = dit_state(), {**text_state(), **tokenizer_tensor()}
    diffusion, encoders = models / "diffusion_models", models / "text_encoders"
    save_file(dit, diffusion / "tiny.safetensors", {"format": "pt"})
    save_file(dit_state(dtype=torch.bfloat16), diffusion / "tiny_bf16.safetensors", {"format": "pt"})
    save_file({f"diffusion_model.{k}": v for k, v in dit.items()}, diffusion / "tiny_prefixed.safetensors")
    save_file(dit_state(ODD), diffusion / "odd.safetensors", header("transformer", ODD))
    save_file(text, encoders / "tiny_text.safetensors", FOR_PRX_PIXEL)
    save_file(
        {**text_state(dtype=torch.bfloat16), **tokenizer_tensor()},
        encoders / "tiny_text_bf16.safetensors",
        FOR_PRX_PIXEL,
    )
    save_file(
        text,
        encoders / "odd_text.safetensors",
        FOR_PRX_PIXEL | header("text_encoder", {"family": "qwen3_vl", **ODD_TEXT}),
    )
    in_one = {PREFIX + k: v for k, v in dit.items()} | {f"text_encoders.{k}": v for k, v in text.items()}
    save_file(in_one, models / "checkpoints" / "tiny_all.safetensors", {"format": "pt"})


def write_bad_files(models: Path) -> None:
    diffusion, encoders = models / "diffusion_models", models / "text_encoders"
    whole = (diffusion / "tiny.safetensors").read_bytes()
    (diffusion / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (diffusion / "lfs_pointer.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    (diffusion / "web_page.safetensors").write_bytes(b"<!DOCTYPE html><html><body>log in</body></html>")
    dit = dit_state()
    missing = {k: v for k, v in dit.items() if not k.startswith("blocks.1.gate_proj")}
    save_file(missing, diffusion / "missing_layer.safetensors")
    save_file(dit | {"blocks.1.gate_proj.weight": torch.zeros(100, 64)}, diffusion / "wrong_shape.safetensors")
    save_file(dit | {"blocks.1.gate_proj.weight_scale": torch.ones(())}, diffusion / "scale_without_marker.safetensors")
    text = {**text_state(), **tokenizer_tensor()}
    save_file(text, diffusion / "a_text_encoder.safetensors")
    save_file(dit, encoders / "a_diffusion_model.safetensors")
    save_file(lora(dit, "diffusion_model.{}"), diffusion / "a_lora.safetensors")
    save_file({"decoder.conv_in.weight": torch.zeros(8, 4, 3, 3)}, diffusion / "a_vae.safetensors")
    save_file({"something.weight": torch.zeros(3)}, diffusion / "unknown.safetensors")
    save_file(text_state(), encoders / "no_tokenizer.safetensors", FOR_PRX_PIXEL)
    without_layer = {k: v for k, v in text.items() if not k.startswith("layers.1.mlp.up_proj")}
    save_file(without_layer, encoders / "missing_layer.safetensors", FOR_PRX_PIXEL)
    save_file(text, encoders / "whose_prompts.safetensors")


DIT_SPELLINGS = {
    "comfy": "diffusion_model.{}",
    "diffusers": "transformer.{}",
    "bare": "{}",
    "peft": "base_model.model.{}",
    "kohya": "lora_unet_{}",
    "onetrainer": "lora_transformer_{}",
}
TEXT_SPELLINGS = {
    "diffusers": "text_encoder.{}",
    "diffusers_nested": "text_encoder.model.{}",
    "comfy": "text_encoders.qwen3_vl.transformer.model.{}",
    "kohya": "lora_te_{}",
    "kohya_numbered": "lora_te1_{}",
    "peft": "base_model.model.{}",
}


def lora(state: dict[str, torch.Tensor], spelling: str, *, strength: float = 1.0, seed: int = 3) -> dict[str, Any]:
    """A LoRA of rank 2 on every matrix but embeddings, with layers named as ``spelling`` says."""
    generator = torch.Generator().manual_seed(seed)
    flat = spelling.startswith("lora_")
    tensors = {}
    for key, weight in sorted(state.items()):
        if weight.ndim != 2 or not key.endswith(".weight") or "embed" in key:
            continue
        layer = key.removesuffix(".weight")
        name = spelling.format(layer.replace(".", "_") if flat else layer)
        down, up = ("lora_down", "lora_up") if flat else ("lora_A", "lora_B")
        tensors[f"{name}.{down}.weight"] = (
            torch.randn(2, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        )
        tensors[f"{name}.{up}.weight"] = strength * torch.randn(weight.shape[0], 2, generator=generator)
        if flat:
            tensors[f"{name}.alpha"] = torch.tensor(2.0)
    return tensors


def write_loras(loras: Path) -> None:
    dit, text = dit_state(), text_state()
    for name, spelling in DIT_SPELLINGS.items():
        save_file(lora(dit, spelling), loras / f"dit_{name}.safetensors")
    for name, spelling in TEXT_SPELLINGS.items():
        save_file(lora(text, spelling), loras / f"text_{name}.safetensors")
    fitting = lora(dit, "diffusion_model.{}")
    layers = sorted({key.split(".lora_")[0] for key in fitting})
    for share, count in (("most", 2), ("few", len(layers) - 2)):
        strange = tuple(layers[:count])
        renamed = {k.replace(".", ".strange.", 1) if k.startswith(strange) else k: v for k, v in fitting.items()}
        save_file(renamed, loras / f"{share}_fit.safetensors")


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)
