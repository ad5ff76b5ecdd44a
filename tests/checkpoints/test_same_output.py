"""A converted file computes the same: diffusers' class on its folder, ComfyUI's own module on our file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_server import at_least
from safetensors.torch import load_file, save_file
from support import rel_err
from tiny_models import TINY, tiny_module, write_folder

from nativedit.checkpoints.convert import convert

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.comfyui, pytest.mark.usefixtures("single_thread")]

B, H, W = 2, 8, 12


@dataclass
class Case:
    """ComfyUI's module and arguments; ``inputs`` of it; ``reference``: the diffusers model on the same inputs."""

    module: str
    arguments: dict[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    reference: Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TIMES = torch.tensor([0.25, 0.75])


def packed(x: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] to tokens of 2 x 2, channels first, as the pipelines of diffusers do it."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def unpacked(tokens: torch.Tensor, h: int = H, w: int = W) -> torch.Tensor:
    b, _, c = tokens.shape
    return tokens.view(b, h // 2, w // 2, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c // 4, h, w)


def grid(h: int, w: int, size: int = 3) -> torch.Tensor:
    ids = torch.zeros(h, w, size)
    ids[..., 1], ids[..., 2] = torch.arange(h)[:, None], torch.arange(w)[None]
    return ids.reshape(h * w, size)


def flux(model, given):
    options = (
        {"guidance": given["guidance"]} if "guidance" in given and hasattr(model.config, "guidance_embeds") else {}
    )
    if "y" in given:
        options["pooled_projections"] = given["y"]
    out = model(
        packed(given["x"]),
        encoder_hidden_states=given["context"],
        timestep=given["timestep"],
        img_ids=grid(H // 2, W // 2),
        txt_ids=torch.zeros(given["context"].shape[1], 3),
        return_dict=False,
        **options,
    )[0]
    return unpacked(out)


def flux2(model, given):
    ids = torch.zeros(5, 4)
    ids[:, 3] = torch.arange(5)
    out = model(
        given["x"].flatten(2).transpose(1, 2),
        encoder_hidden_states=given["context"],
        timestep=given["timestep"],
        guidance=given["guidance"],
        img_ids=grid(H, W, 4),
        txt_ids=ids,
        return_dict=False,
    )[0]
    return out.transpose(1, 2).reshape(given["x"].shape)


def z_image(model, given):
    pictures = [picture.unsqueeze(1) for picture in given["x"]]
    out = model(pictures, 1 - given["timesteps"], list(given["context"]), return_dict=False)[0]
    return -torch.stack([picture.squeeze(1) for picture in out])


def lumina2(model, given):
    mask = torch.ones(given["context"].shape[:2], dtype=torch.long)
    return -model(given["x"], 1 - given["timesteps"], given["context"], mask, return_dict=False)[0]


def qwen_image(model, given):
    out = model(
        packed(given["x"].squeeze(2)),
        encoder_hidden_states=given["context"],
        timestep=given["timestep"],
        img_shapes=[[(1, H // 2, W // 2)]] * B,
        return_dict=False,
    )[0]
    return unpacked(out).unsqueeze(2)


def wan(model, given):
    return model(
        given["x"],
        given["timestep"],
        given["context"],
        encoder_hidden_states_image=given.get("clip_fea"),
        return_dict=False,
    )[0]


def krea2(model, given):
    tokens = given["context"].shape[1]
    ids = torch.cat([torch.zeros(tokens, 3), grid(H // 2, W // 2)])
    context = given["context"].unflatten(2, (3, 256))
    return unpacked(model(packed(given["x"]), context, given["timesteps"], ids, return_dict=False)[0])


def ernie_image(model, given):
    lengths = torch.full((B,), given["context"].shape[1])
    return model(given["x"], given["timesteps"], given["context"], lengths, return_dict=False)[0]


def sd3(model, given):
    return model(given["x"], given["context"], given["y"], given["timesteps"], return_dict=False)[0]


def mmdit_arguments(**more: Any) -> dict[str, Any]:
    return {
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "context_in_dim": 40,
        "hidden_size": 256,
        "mlp_ratio": 4.0,
        "num_heads": 2,
        "depth": 2,
        "depth_single_blocks": 2,
        "axes_dim": [16, 56, 56],
        "theta": 10000,
        "qkv_bias": True,
        "txt_ids_dims": [],
        "vec_in_dim": 24,
        **more,
    }


def flux_inputs(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": noise(B, 16, H, W), "timestep": TIMES, "context": noise(B, 5, 40), **more}


def sd3_case(dual: list[int]) -> Case:
    return Case(
        "comfy.ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper",
        {
            "in_channels": 16,
            "out_channels": 16,
            "depth": 3,
            "input_size": None,
            "adm_in_channels": 24,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": 40, "out_features": 192},
            },
            "num_patches": 144,
            "pos_embed_max_size": 12,
            "qk_norm": "rms",
            "x_block_self_attn_layers": dual,
        },
        lambda: {"x": noise(B, 16, H, W), "timesteps": TIMES * 8, "context": noise(B, 5, 40), "y": noise(B, 24)},
        sd3,
    )


def wan_arguments(**more: Any) -> dict[str, Any]:
    sizes = {"in_dim": 16, "dim": 256, "ffn_dim": 96, "text_dim": 40, "num_heads": 2, "num_layers": 2}
    return {"model_type": "t2v", **sizes, **more}


CASES: dict[str, Case] = {
    "z_image": Case(
        "comfy.ldm.lumina.model:NextDiT",
        {
            "in_channels": 16,
            "dim": 1152,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 9,
            "n_kv_heads": 9,
            "qk_norm": True,
            "cap_feat_dim": 48,
            "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
            "rope_theta": 256.0,
            "ffn_dim_multiplier": 8.0 / 3.0,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 32,
        },
        lambda: {"x": noise(B, 16, H, W), "timesteps": TIMES, "context": noise(B, 20, 48)},
        z_image,
        {"num_tokens": 20},
        # wide enough for the published size of the timestep's layers, which diffusers takes for granted
        {"dim": 1152, "n_layers": 1, "n_heads": 9, "n_kv_heads": 9},
    ),
    "lumina2": Case(
        "comfy.ldm.lumina.model:NextDiT",
        {
            "in_channels": 16,
            "dim": 384,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 4,
            "n_kv_heads": 2,
            "qk_norm": True,
            "cap_feat_dim": 48,
            "axes_dims": [32, 32, 32],
            "axes_lens": [300, 512, 512],
            "ffn_dim_multiplier": 4.0,
        },
        lambda: {"x": noise(B, 16, H, W), "timesteps": TIMES, "context": noise(B, 20, 48)},
        lumina2,
        {"num_tokens": 20},
    ),
    "qwen_image": Case(
        "comfy.ldm.qwen_image.model:QwenImageTransformer2DModel",
        {"num_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 48},
        lambda: {"x": noise(B, 16, 1, H, W), "timestep": TIMES, "context": noise(B, 5, 48)},
        qwen_image,
    ),
    "flux_dev": Case(
        "comfy.ldm.flux.model:Flux",
        mmdit_arguments(guidance_embed=True),
        lambda: flux_inputs(y=noise(B, 24), guidance=torch.tensor([3.5, 2.0])),
        flux,
    ),
    "flux_schnell": Case(
        "comfy.ldm.flux.model:Flux",
        mmdit_arguments(guidance_embed=False, depth=1),
        lambda: flux_inputs(y=noise(B, 24)),
        flux,
    ),
    "flux2_dev": Case(
        "comfy.ldm.flux.model:Flux",
        mmdit_arguments(
            in_channels=128,
            out_channels=128,
            patch_size=1,
            mlp_ratio=3.0,
            axes_dim=[32, 32, 32, 32],
            theta=2000,
            qkv_bias=False,
            txt_ids_dims=[3],
            vec_in_dim=None,
            guidance_embed=True,
            global_modulation=True,
            mlp_silu_act=True,
            ops_bias=False,
        ),
        lambda: {**flux_inputs(guidance=torch.tensor([3.5, 2.0])), "x": noise(B, 128, H, W)},
        flux2,
    ),
    # As many blocks as the published model has: ComfyUI takes the number of modulations for granted.
    "chroma": Case(
        "comfy.ldm.chroma.model:Chroma",
        {
            **mmdit_arguments(hidden_size=128, num_heads=1, depth=19, depth_single_blocks=38, vec_in_dim=None),
            "in_channels": 64,
            "out_channels": 64,
            "in_dim": 64,
            "out_dim": 128,
            "hidden_dim": 64,
            "n_layers": 2,
        },
        lambda: flux_inputs(guidance=torch.zeros(B)),
        flux,
        changes={"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 1},
    ),
    "wan21_t2v_14b": Case(
        "comfy.ldm.wan.model:WanModel",
        wan_arguments(),
        lambda: {"x": noise(1, 16, 3, H, W), "timestep": torch.tensor([3.0]), "context": noise(1, 5, 40)},
        wan,
    ),
    "wan21_i2v_14b": Case(
        "comfy.ldm.wan.model:WanModel",
        wan_arguments(model_type="i2v", in_dim=36),
        lambda: {
            "x": noise(1, 36, 2, H, W),
            "timestep": torch.tensor([3.0]),
            "context": noise(1, 512, 40),  # diffusers tells the picture's tokens by the number of the text's
            "clip_fea": noise(1, 257, 1280),
        },
        wan,
    ),
    "krea2": Case(
        "comfy.ldm.krea2.model:SingleStreamDiT",
        {
            "features": 512,
            "txtdim": 256,
            "heads": 4,
            "kvheads": 2,
            "layers": 2,
            "txtlayers": 3,
            "txtheads": 2,
            "txtkvheads": 2,
        },
        lambda: {"x": noise(B, 16, H, W), "timesteps": TIMES, "context": noise(B, 5, 3 * 256)},
        krea2,
    ),
    "ernie_image": Case(
        "comfy.ldm.ernie.model:ErnieImageModel",
        {
            "hidden_size": 256,
            "num_attention_heads": 2,
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "in_channels": 32,
            "out_channels": 32,
            "text_in_dim": 48,
        },
        lambda: {"x": noise(B, 32, H, W), "timesteps": TIMES * 8, "context": noise(B, 5, 48)},
        ernie_image,
    ),
    "sd35_large": sd3_case([]),
    "sd35_medium": sd3_case([0, 1]),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, comfyui_path, comfyui_interpreter) -> Path:
    """A folder with what both worlds computed; one process of ComfyUI for all of them."""
    folder = tmp_path_factory.mktemp("outputs")
    jobs = []
    for row, case in CASES.items():
        _, arguments = TINY[row]
        module = tiny_module(row, {**arguments, **case.changes})
        inputs = case.inputs()
        with torch.no_grad():
            save_file({"output": case.reference(module, inputs).contiguous()}, folder / f"{row}.theirs.safetensors")
        save_file(inputs, folder / f"{row}.inputs.safetensors")
        convert(write_folder(folder / row, module), folder / f"{row}.safetensors")
        jobs.append(
            {
                "module": case.module,
                "arguments": case.arguments,
                "options": case.options,
                "file": str(folder / f"{row}.safetensors"),
                "inputs": str(folder / f"{row}.inputs.safetensors"),
                "output": str(folder / f"{row}.ours.safetensors"),
            }
        )
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("comfyui_outputs.py")
    run = subprocess.run(
        [str(comfyui_interpreter), str(script), str(folder / "jobs.json")],
        cwd=comfyui_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return folder


@pytest.mark.parametrize("row", list(CASES))
def test_comfyuis_module_on_our_file_equals_diffusers_on_the_original(row, outputs, comfyui_path):
    error = outputs / f"{row}.ours.safetensors.error"
    if error.exists() and "No module named 'comfy.ldm." in error.read_text() and not at_least(comfyui_path, "0.33"):
        pytest.skip(f"this ComfyUI is older than {row}")
    assert not error.exists(), error.read_text()
    ours = load_file(outputs / f"{row}.ours.safetensors")["output"]
    theirs = load_file(outputs / f"{row}.theirs.safetensors")["output"]
    assert ours.shape == theirs.shape and theirs.abs().max() > 1e-3
    assert rel_err(ours, theirs) < 1e-5
