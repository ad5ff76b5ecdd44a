"""Latent PRX with T5Gemma in ComfyUI's graph: the example workflow's numbers are the engine's."""

from __future__ import annotations

import json
from pathlib import Path

import comfyui_files as files
import pytest
import torch
from comfyui_graphs import node
from comfyui_server import Server
from safetensors.torch import load_file, save_file
from support import ROOT, rel_err

pytestmark = pytest.mark.comfyui

DIT = {"context_in_dim": 32, "hidden_size": 64, "mlp_ratio": 2.0, "num_heads": 2, "depth": 3}
KINDS = {
    "prx": {"in_channels": 16, "patch_size": 2, **DIT},
    "prx_dc_ae": {"in_channels": 32, "patch_size": 1, **DIT},
}
# What T5Gemma's shapes can't tell travels in the header.
TEXT = {
    "vocab_size": len(files.WORDS) + 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_offset": True,
    "embed_scale": 32**0.5,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 50.0,
    "block_norms": "t5gemma",
    "causal": False,
}


def write(models: Path, name: str) -> None:
    """Tiny random weights under the names that the card and the example workflow know."""
    from nativedit.ldm.prx.model import PRXTransformer2DModel
    from nativedit.supported_models import get_architecture
    from nativedit.text_encoders.language_model import LanguageModel

    known = get_architecture(name).files
    dit = files.random_state(PRXTransformer2DModel(**KINDS[name], device="meta"), 4)
    text = files.random_state(LanguageModel(**TEXT, device="meta"), 5)
    for folder in ("diffusion_models", "text_encoders"):
        (models / folder).mkdir(parents=True, exist_ok=True)
    save_file(dit, models / "diffusion_models" / known["diffusion_models"][0], {"format": "pt"})
    header = files.header("text_encoder", {"family": "t5gemma", **TEXT})
    save_file({**text, **files.tokenizer_tensor()}, models / "text_encoders" / known["text_encoders"][0], header)


def graph(name: str) -> dict:
    """The example workflow up to its latent, small, with a prompt of the tiny tokenizer's words."""
    from nativedit.supported_models import get_architecture

    prompt = json.loads((ROOT / "example_workflows" / "api" / "prx.json").read_text(encoding="utf-8"))
    prompt = {key: value for key, value in prompt.items() if key in "123456"}
    prompt["1"]["inputs"]["unet_name"] = get_architecture(name).files["diffusion_models"][0]
    prompt["2"]["inputs"]["architecture"] = name
    prompt["3"]["inputs"]["text"] = "A Red CIRCLE above a blue square &amp; see https://example.com/circle.png"
    prompt["5"]["inputs"] |= {"width": 128, "height": 96}
    prompt["6"]["inputs"]["steps"] = 6
    prompt["save"] = node("SaveLatent", samples=["6", 0], filename_prefix="latents/prx")
    return prompt


@pytest.mark.parametrize("name", KINDS)
def test_the_example_workflows_latent_is_the_engines(server: Server, tmp_path: Path, name: str):
    import nativedit

    write(server.base / "models", name)
    write(tmp_path, name)
    ours = nativedit.run(graph(name), models_dir=tmp_path, output_dir=tmp_path / "output", progress=False)
    expected = ours.outputs["6"][0]["samples"]
    saved = server.run(graph(name))["save"]["latents"][0]
    latent = load_file(server.file_of(saved))["latent_tensor"]
    channels, compression = (16, 8) if name == "prx" else (32, 32)
    assert latent.shape == (1, channels, 96 // compression, 128 // compression) and torch.isfinite(latent).all()
    assert latent.std() > 0.1 and rel_err(latent, expected) <= 1e-4
