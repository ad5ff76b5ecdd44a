"""Tiny models of ComfyUI's own architectures, as files in its layout, and inputs for their modules."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import TINY, tiny_module, write_folder

# Rows of tiny_models that ComfyUI's detection takes at this size, and what is changed: it takes some sizes for granted.
ROWS = {
    "flux_dev": {},
    "flux2_dev": {},
    "wan21_t2v_14b": {"text_dim": 4096},
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
    if row == "wan21_t2v_14b":
        return {"x": _noise(1, 16, 3, H, W), "timestep": torch.tensor([3.0]), "context": _noise(1, 5, 4096)}
    y = _noise(1, 24)
    return {"x": _noise(1, 16, H, W), "timesteps": torch.tensor([4.0]), "context": _noise(1, 5, 40), "y": y}


def write(folder: Path, base: Path, rows: list[str] | None = None) -> None:
    """Files of bfloat16 weights into BASE/models/diffusion_models, inputs into BASE/inputs."""
    from nativedit.checkpoints.convert import convert

    (base / "inputs").mkdir()
    for row in rows or ROWS:
        module = tiny_module(row, {**TINY[row][1], **ROWS[row]})
        source = write_folder(folder / row, module, dtype=torch.bfloat16)
        convert(source, base / "models" / "diffusion_models" / f"{row}.safetensors")
        save_file(inputs(row), base / "inputs" / f"{row}.safetensors")
