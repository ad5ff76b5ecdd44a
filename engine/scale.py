"""Resizing pictures and latents [B, C, H, W]."""

from __future__ import annotations

import torch

__all__ = ["IMAGE_METHODS", "LATENT_METHODS", "resize"]

LATENT_METHODS = ["nearest-exact", "bilinear", "area", "bicubic"]
IMAGE_METHODS = [*LATENT_METHODS, "lanczos"]


def resize(x: torch.Tensor, width: int, height: int, method: str, crop: bool = False) -> torch.Tensor:
    """x at another size; crop: first cut to the new proportions, around the middle. As ComfyUI's upscale nodes."""
    if crop:
        x = _cropped(x, width / height)
    if method == "lanczos":
        return _lanczos(x, width, height)
    return torch.nn.functional.interpolate(x, size=(height, width), mode=method)


def _cropped(x: torch.Tensor, aspect: float) -> torch.Tensor:
    height, width = x.shape[-2:]
    left = round((width - width * aspect / (width / height)) / 2) if width / height > aspect else 0
    top = round((height - height * (width / height) / aspect) / 2) if width / height < aspect else 0
    return x[..., top : height - top, left : width - left]


def _lanczos(x: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """By Pillow, in 8 bits."""
    from PIL import Image

    scaled = []
    for picture in x:
        pixels = (picture.movedim(0, -1).cpu() * 255.0).clamp(0, 255).to(torch.uint8)
        image = Image.fromarray(pixels.squeeze(-1).numpy()).resize((width, height), Image.Resampling.LANCZOS)
        values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(height, width, -1) / 255.0
        scaled.append(values.movedim(-1, 0))
    return torch.stack(scaled)
