"""Tiny Sana, Sprint, Gemma 2 and DC-AE with random weights, in the files that people have, and a trained tokenizer."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import comfyui_files as files
import torch
from comfyui_graphs import Graph, node, text_to_latent
from safetensors.torch import save_file
from support import ROOT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

DIT = {
    "num_attention_heads": 2,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 32,
    "cross_attention_dim": 64,
    "caption_channels": 48,
}
SPRINT = {**DIT, "guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
LARGE = {**DIT, "sample_size": 128, "interpolation_scale": 2.0}
LAYERS, WINDOW = 2, 100
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_offset": True,
    "embed_scale": 48**0.5,
    "attn_logit_softcapping": 50.0,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "block_norms": "gemma2",
}
# Wide enough for every quantization format.
WIDE_DIT = DIT | {
    "num_attention_heads": 8,
    "num_cross_attention_heads": 8,
    "cross_attention_dim": 256,
    "caption_channels": 256,
}
WIDE_GEMMA = TEXT | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "query_pre_attn_scalar": 128,
    "embed_scale": 16.0,
}
NAMES = {"diffusion_models": "sana_wide.safetensors", "text_encoders": "gemma_wide.safetensors"}
MODEL, SPRINT_MODEL, CLIP, VAE = (
    "sana.safetensors",
    "sana_sprint.safetensors",
    "gemma.safetensors",
    "dc_ae_sana.safetensors",
)
PUBLISHERS_VAE = "dc_ae_as_published.safetensors"
PROMPT = "A Red circle above a blue Square, on a small background "


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-pair encoding of pieces that begin with a blank, as Gemma's, begin token included."""
    from nativedit.supported_models._sana import INSTRUCTION

    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"])
    trained.train_from_iterator([INSTRUCTION, INSTRUCTION.lower(), PROMPT.lower(), "blurry ugly"], trainer)
    trained.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return trained


def text_config(config: dict[str, Any] = TEXT) -> dict[str, Any]:
    return {**config, "vocab_size": tokenizer().get_vocab_size()}


def dit_state(config: dict[str, Any], seed: int = 21) -> dict[str, torch.Tensor]:
    from nativedit.ldm.sana.model import SanaTransformer2DModel

    return files.random_state(SanaTransformer2DModel(**config, device="meta"), seed)


def text_state(config: dict[str, Any] = TEXT) -> dict[str, torch.Tensor]:
    from nativedit.text_encoders.language_model import LanguageModel

    return files.random_state(LanguageModel(**text_config(config), device="meta"), 23)


def published(state: dict[str, torch.Tensor], tokens: int | None = None) -> dict[str, torch.Tensor]:
    """Sana's weights in the publisher's own layout; tokens: of its position table."""
    simple = {
        "patch_embed.": "x_embedder.",
        "caption_projection.linear_": "y_embedder.y_proj.fc",
        "caption_norm.": "attention_y_norm.",
        "time_embed.emb.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
        "time_embed.emb.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
        "time_embed.linear.": "t_block.1.",
        "proj_out.": "final_layer.linear.",
        "scale_shift_table": "final_layer.scale_shift_table",
    }
    within = {
        "attn1.to_out.0.": "attn.proj.",
        "attn2.to_q.": "cross_attn.q_linear.",
        "attn2.to_out.0.": "cross_attn.proj.",
        "ff.conv_inverted.": "mlp.inverted_conv.conv.",
        "ff.conv_depth.": "mlp.depth_conv.conv.",
        "ff.conv_point.": "mlp.point_conv.conv.",
        "scale_shift_table": "scale_shift_table",
    }
    theirs = {}
    for key, value in state.items():
        if not key.startswith("transformer_blocks."):
            [(ours, name)] = [pair for pair in simple.items() if key.startswith(pair[0])]
            theirs[name + key.removeprefix(ours)] = value
            continue
        _, number, rest = key.split(".", 2)
        named = [name + rest.removeprefix(ours) for ours, name in within.items() if rest.startswith(ours)]
        if named:
            theirs[f"blocks.{number}.{named[0]}"] = value
    for number in range(LAYERS):
        block = f"transformer_blocks.{number}."
        qkv = [state[f"{block}attn1.to_{name}.weight"] for name in "qkv"]
        theirs[f"blocks.{number}.attn.qkv.weight"] = torch.cat(qkv)
        for kind in ("weight", "bias"):
            kv = [state[f"{block}attn2.to_{name}.{kind}"] for name in "kv"]
            theirs[f"blocks.{number}.cross_attn.kv_linear.{kind}"] = torch.cat(kv)
    theirs["y_embedder.y_embedding"] = torch.zeros(300, 48)
    if tokens is not None:
        theirs["pos_embed"] = torch.zeros(1, tokens, 64)
    return theirs


def write(folder: Path) -> None:
    """Into ComfyUI's models folder."""
    diffusion = folder / "diffusion_models"
    state = dit_state(DIT)
    save_file(state, diffusion / MODEL, {"format": "pt"})
    save_file(dit_state(SPRINT), diffusion / SPRINT_MODEL, {"format": "pt"})
    save_file(state, diffusion / "sana_4k.safetensors", files.header("transformer", LARGE))
    torch.save({"state_dict": published(state)}, diffusion / "sana.pth")
    torch.save({"state_dict": published(state, 128 * 128)}, diffusion / "sana_4k.pth")
    write_text_encoder(folder / "text_encoders" / CLIP)
    autoencoder = files.random_state(files.autoencoder("dc_ae", device="meta"), 25)
    save_file(autoencoder, folder / "vae" / VAE)
    save_file(files.publishers_dc_ae(autoencoder), folder / "vae" / PUBLISHERS_VAE)


def write_text_encoder(path: Path, config: dict[str, Any] = TEXT) -> None:
    header = files.header("text_encoder", {"family": "gemma2", **text_config(config)})
    save_file({**text_state(config), **tokenizer_tensors()}, path, header)


def write_wide(models: Path) -> None:
    """The transformer and the text encoder alone, both wide."""
    config = files.header("transformer", WIDE_DIT)
    save_file(dit_state(WIDE_DIT), models / "diffusion_models" / NAMES["diffusion_models"], config)
    write_text_encoder(models / "text_encoders" / NAMES["text_encoders"], WIDE_GEMMA)


def tokenizer_tensors() -> dict[str, torch.Tensor]:
    from nativedit.text_encoders.tokenizer import bytes_tensor

    options = {"bos_token": "<bos>", "pad_token": "<pad>", "eos_token": "<eos>"}
    return {
        "tokenizer_json": bytes_tensor(tokenizer().to_str().encode()),
        "tokenizer_config": bytes_tensor(json.dumps(options).encode()),
    }


def graph(**settings: Any) -> Graph:
    """Sana, 4 by 3 latent pixels. The text encoder is nobody else's, so its loader is told nothing."""
    chosen = {"model": MODEL, "clip": CLIP, "prompt": PROMPT, "size": (128, 96), "cfg": 4.5} | settings
    return text_to_latent(**chosen)


def sprint_graph(**settings: Any) -> Graph:
    chosen = {"model": SPRINT_MODEL, "cfg": 1.0, "steps": 2, "sampler": "lcm", "scheduler": "published"} | settings
    return graph(**chosen)


def example(name: str) -> Graph:
    """An example workflow's API form up to its latent, on the tiny files and small."""
    graph = json.loads((ROOT / "example_workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    graph = {key: value for key, value in graph.items() if value["class_type"] not in ("VAEDecode", "SaveImage")}
    tiny = {
        "unet_name": SPRINT_MODEL if "sprint" in name else MODEL,
        "file": CLIP,
        "vae_name": VAE,
        "width": 128,
        "height": 96,
    }
    for entry in graph.values():
        entry["inputs"].update({key: value for key, value in tiny.items() if key in entry["inputs"]})
    [sampler] = [key for key, value in graph.items() if value["class_type"] == "KSampler"]
    return {**graph, "save": node("SaveLatent", samples=[sampler, 0], filename_prefix="latents/example")}


def with_guidance(made: Graph, guidance: float) -> Graph:
    """ComfyUI's node for models that embed their guidance, after the prompt."""
    made = {key: {**value, "inputs": dict(value["inputs"])} for key, value in made.items()}
    made["guided"] = node("FluxGuidance", conditioning=["positive", 0], guidance=guidance)
    made["sampler"]["inputs"]["positive"] = ["guided", 0]
    return made


def with_negative(made: Graph, text: str) -> Graph:
    return {**made, "negative": node("NativeDiTNegativePrompt", clip=["clip", 0], text=text)}
