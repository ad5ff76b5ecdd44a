"""VAE: pictures to latents and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PIXEL_SPACE", "PixelSpace", "crop_to"]

# ComfyUI's VAELoader offers this name for models that work on pixels.
PIXEL_SPACE = "pixel_space"


def crop_to(pictures: torch.Tensor, multiple: int) -> torch.Tensor:
    """The middle of pictures [B, H, W, C] whose sides are multiples, without an alpha channel; as ComfyUI crops."""
    for axis in (1, 2):
        size = pictures.shape[axis]
        kept = size // multiple * multiple
        pictures = pictures.narrow(axis, size % multiple // 2, kept)
    return pictures[..., :3]


@dataclass(frozen=True)
class PixelSpace:
    """No autoencoder: the latent is the picture, from -1 to 1."""

    name: str = PIXEL_SPACE
    channels: int = 3
    compression: int = 1

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        return crop_to(pictures, 1).movedim(-1, 1) * 2.0 - 1.0

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return ((latents.float() + 1.0) / 2.0).clamp(0.0, 1.0).movedim(1, -1)
