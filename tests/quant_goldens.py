"""Checkpoints written by ComfyUI 0.33.0 itself, with its numbers: some in tests/data, all in ../shared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from support import DATA, find_shared

if TYPE_CHECKING:
    import torch

# How to ask for what each file holds: (format, fast_matmul). Files that are not here are read only: older dialects,
# calibrated scales, and a bank that ComfyUI reads wrongly.
RECIPES = {
    "float8_e4m3fn": ("float8_e4m3fn", True),
    "float8_e4m3fn_full_precision_mm": ("float8_e4m3fn", False),
    "float8_e5m2": ("float8_e5m2", True),
    "nvfp4": ("nvfp4", False),
    "mxfp8": ("mxfp8", False),
    "int8_tensorwise": ("int8_tensorwise:scale=tensor", False),
    "int8_tensorwise_per_row": ("int8_tensorwise", False),
    "int8_tensorwise_convrot256": ("int8_convrot", False),
    "int8_tensorwise_convrot64": ("int8_tensorwise:convrot=64", False),
    "convrot_w4a4": ("convrot_w4a4", False),
    "convrot_w4a4_group64_int8gemm": ("convrot_w4a4:convrot=64,linear=int8", False),
    "asym_w4a8_int8": ("asym_w4a8_int8", False),
    "asym_w4a8_int8_group32_nocodebook": ("asym_w4a8_int8:convrot=64,group=32,codebook=no", False),
    "embedding_float8_e4m3fn": ("float8_e4m3fn", True),
    "embedding_int8_tensorwise": ("int8_tensorwise:scale=tensor", False),
    "embedding_int8_tensorwise_per_row": ("int8_tensorwise", False),
    "embedding_int8_tensorwise_convrot256": ("int8_convrot", False),
    "moe_convrot_w4a4": ("convrot_w4a4", False),
    "moe_float8_e4m3fn": ("float8_e4m3fn", True),
    "moe_int8_tensorwise_per_row": ("int8_tensorwise", False),
    "moe_mxfp8": ("mxfp8", False),
    "moe_nvfp4": ("nvfp4", False),
}


@dataclass(frozen=True)
class QuantGolden:
    name: str
    folder: Path

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.safetensors"

    @property
    def converted(self) -> Path:
        """What ComfyUI's own conversion of an older dialect gives; exists for those only."""
        return self.folder / f"{self.name}.converted.safetensors"

    @cached_property
    def expect(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{self.name}.expect.safetensors")

    def group(self, name: str) -> dict[str, torch.Tensor]:
        return {key[len(name) + 1 :]: value for key, value in self.expect.items() if key.startswith(f"{name}.")}

    @property
    def prefix(self) -> str:
        """What the file's keys have in front of the names in the expected numbers."""
        return "model.diffusion_model." if self.name.endswith("prefixed") else ""

    @property
    def is_bank(self) -> bool:
        return "moe" in self.name

    @property
    def misread_by_comfyui(self) -> bool:
        return self.name.startswith("xbug")


def quant_goldens() -> list[QuantGolden]:
    roots = [DATA / "comfy_quant"]
    if shared := find_shared():
        roots.append(shared / "reference" / "comfy_quant")
    found: dict[str, QuantGolden] = {}
    for root in roots:
        for path in sorted(root.glob("*.expect.safetensors")):
            name = path.name.removesuffix(".expect.safetensors")
            found.setdefault(name, QuantGolden(name, root))
    return [golden for _, golden in sorted(found.items())]


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (NaN equals NaN)."""
    import torch

    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*bits)
