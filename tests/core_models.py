"""Tiny models of ComfyUI's own architectures, as files in its layout, and inputs for their modules."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import TINY, tiny_module, write_folder

# Rows of tiny_models that ComfyUI's own classes hold, and what is changed. Its detection takes some sizes for granted:
# comfyui/narrow.py reads them from the shapes instead.
ROWS = {
    "flux_dev": {},
    "flux2_dev": {},
    "z_image": {"dim": 384, "n_layers": 1, "n_heads": 3, "n_kv_heads": 3},
    "qwen_image": {"joint_attention_dim": 256},
    "wan21_t2v_14b": {"text_dim": 4096},
    "chroma": {"approximator_hidden_dim": 256},
    "lumina2": {"hidden_size": 768, "num_layers": 1, "num_attention_heads": 8, "ffn_dim_multiplier": 0.25},
    "sd35_large": {},
}
H, W = 8, 12


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _flux(channels: int = 16, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": _noise(1, channels, H, W), "timestep": torch.tensor([0.4]), "context": _noise(1, 5, 40), **more}


def inputs(row: str) -> dict[str, torch.Tensor]:
    """Of ComfyUI's module, by the names of its arguments."""
    if row == "flux_dev":
        return _flux(y=_noise(1, 24), guidance=torch.tensor([3.5]))
    if row == "flux2_dev":
        return _flux(128, guidance=torch.tensor([3.5]))
    if row == "chroma":
        return _flux(guidance=torch.tensor([0.0]))
    if row in ("z_image", "lumina2"):
        given = {"x": _noise(1, 16, H, W), "timesteps": torch.tensor([0.4]), "context": _noise(1, 5, 48)}
        return {**given, "num_tokens": torch.tensor(5)}
    if row == "qwen_image":
        return {"x": _noise(1, 16, 1, H, W), "timestep": torch.tensor([0.4]), "context": _noise(1, 5, 256)}
    if row == "wan21_t2v_14b":
        return {"x": _noise(1, 16, 3, H, W), "timestep": torch.tensor([3.0]), "context": _noise(1, 5, 4096)}
    y = _noise(1, 24)
    return {"x": _noise(1, 16, H, W), "timesteps": torch.tensor([4.0]), "context": _noise(1, 5, 40), "y": y}


def _narrow_time_embedder(module: torch.nn.Module) -> None:
    """Diffusers makes it 1024 wide, ComfyUI no wider than the model: the same for published widths."""
    mlp, width = module.t_embedder.mlp, ROWS["z_image"]["dim"]
    mlp[0] = _linear(mlp[0].weight[:width], mlp[0].bias[:width])
    mlp[2] = _linear(mlp[2].weight[:, :width], mlp[2].bias)


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer.requires_grad_(False)


def write(folder: Path, base: Path, rows: list[str] | None = None) -> None:
    """Files of bfloat16 weights into BASE/models/diffusion_models, inputs into BASE/inputs."""
    from nativedit.checkpoints.convert import convert

    (base / "inputs").mkdir()
    for row in rows or ROWS:
        module = tiny_module(row, {**TINY[row][1], **ROWS[row]})
        if row == "z_image":
            _narrow_time_embedder(module)
        source = write_folder(folder / row, module, dtype=torch.bfloat16)
        convert(source, base / "models" / "diffusion_models" / f"{row}.safetensors")
        save_file(inputs(row), base / "inputs" / f"{row}.safetensors")
