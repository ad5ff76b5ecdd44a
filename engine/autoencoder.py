"""VAE: pictures [B, H, W, 3] from 0 to 1 to raw latents [B, C, h, w] and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PIXEL_SPACE", "NativeAutoencoder", "PixelSpace", "crop_to"]

# ComfyUI's VAELoader offers this name for models that work on pixels.
PIXEL_SPACE = "pixel_space"


def crop_to(pictures: torch.Tensor, multiple: int) -> torch.Tensor:
    """The middle of pictures [B, H, W, C] whose sides are multiples, without an alpha channel; as ComfyUI crops."""
    for axis in (1, 2):
        size = pictures.shape[axis]
        pictures = pictures.narrow(axis, size % multiple // 2, size // multiple * multiple)
    return pictures[..., :3]


def _to_picture(pixels: torch.Tensor) -> torch.Tensor:
    return ((pixels.float() + 1.0) / 2.0).clamp(0.0, 1.0).movedim(1, -1).cpu()


@dataclass(frozen=True)
class PixelSpace:
    """No autoencoder: the latent is the picture, from -1 to 1."""

    name: str = PIXEL_SPACE
    channels: int = 3
    compression: int = 1

    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        return crop_to(pictures, 1).movedim(-1, 1) * 2.0 - 1.0

    def decode(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        return _to_picture(latents)


@dataclass(frozen=True)
class NativeAutoencoder:
    """An autoencoder of ``nativedit.autoencoders``; computes in float32 unless told otherwise, as ComfyUI does on a
    CPU."""

    name: str
    module: torch.nn.Module
    channels: int
    compression: int
    device: torch.device
    dtype: torch.dtype = torch.float32

    @torch.inference_mode()
    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        pixels = crop_to(pictures, self.compression).movedim(-1, 1).to(self.device, self.dtype) * 2.0 - 1.0
        return torch.cat([self.module.encode(one) for one in pixels.split(1)]).float().cpu()

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """tile: side in picture pixels of the tiles to decode in, None = in one go."""
        latents = latents.to(self.device, self.dtype)
        if tile is None:
            decoded = [self.module.decode(one) for one in latents.split(1)]
        else:
            decoded = [self.module.tiled_decode(one, tile=tile) for one in latents.split(1)]
        return _to_picture(torch.cat(decoded))
