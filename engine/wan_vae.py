"""The first autoencoder of Wan, which two families of models share: ComfyUI's core has it, here it is diffusers'."""
# Wan 2.1's; the families are Qwen-Image and Nucleus-Image.

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from ..files.errors import FileError
from ..files.source import open_source
from .autoencoder import crop_to

__all__ = ["WanAutoencoder", "load_wan_autoencoder"]

# A key that only this layout has -> the keys of its first and its last convolution.
_LAYOUTS = {
    "decoder.middle.0.residual.0.gamma": ("encoder.conv1.weight", "conv2.weight"),  # Wan's own, and ComfyUI's
    "decoder.mid_block.resnets.0.norm1.gamma": ("encoder.conv_in.weight", "post_quant_conv.weight"),  # diffusers'
}


@dataclass(frozen=True)
class WanAutoencoder:
    """Pictures only: a latent without an axis for time. Computes in the module's dtype."""

    name: str
    module: Any
    channels: int
    device: torch.device
    dtype: torch.dtype
    compression: int = 8

    @torch.inference_mode()
    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        pixels = crop_to(pictures, self.compression).movedim(-1, 1).to(self.device, self.dtype) * 2.0 - 1.0
        latents = [self.module.encode(one[:, :, None]).latent_dist.mode()[:, :, 0] for one in pixels.split(1)]
        return torch.cat(latents).float().cpu()

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """latents: [B, C, h, w] or [B, C, 1, h, w]; tile: side in picture pixels of the tiles, None = in one go."""
        if latents.ndim == 4:
            latents = latents[:, :, None]
        if tile is None:
            self.module.disable_tiling()
        else:
            sides = {"tile_sample_min_height": tile, "tile_sample_min_width": tile}
            strides = {"tile_sample_stride_height": tile * 3 // 4, "tile_sample_stride_width": tile * 3 // 4}
            self.module.enable_tiling(**sides, **strides)
        latents = latents.to(self.device, self.dtype)
        pixels = torch.cat([self.module.decode(one).sample[:, :, 0] for one in latents.split(1)])
        return ((pixels.float() + 1.0) / 2.0).clamp(0.0, 1.0).movedim(1, -1).cpu()


def load_wan_autoencoder(
    path: str | os.PathLike, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> WanAutoencoder | None:
    """None for another file. Raises FileError for weights that are missing, left over or of another shape."""
    with open_source(path, component="vae") as source:
        shapes = source.shapes()
        layout = next((marker for marker in _LAYOUTS if marker in shapes), None)
        if layout is None:
            return None
        from diffusers import AutoencoderKLQwenImage
        from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

        first, last = _LAYOUTS[layout]
        with torch.device("meta"):
            module = AutoencoderKLQwenImage(base_dim=shapes[first][0], z_dim=shapes[last][0])
        state = {key: source.read(key) for key in source}
        if layout != "decoder.mid_block.resnets.0.norm1.gamma":
            state = convert_wan_vae_to_diffusers(state)
        try:
            module.load_state_dict({key: value.to(device, dtype) for key, value in state.items()}, assign=True)
        except RuntimeError as error:
            raise FileError(source.path, f"is not the whole of Wan 2.1's autoencoder: {error}") from error
        name = os.path.basename(os.fspath(path))
        return WanAutoencoder(name, module.requires_grad_(False).train(False), shapes[last][0], device, dtype)
