"""VAE: pictures [B, H, W, 3] from 0 to 1 to raw latents [B, C, h, w] and back."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..autoencoders import Autoencoder, find_autoencoder, fit_shape
from ..checkpoints.fill import check_keys
from ..checkpoints.kinds import AUTOENCODER, kind_of, wrong_slot
from ..files.errors import FileError
from ..files.source import open_source
from ..ldm.layers.operations import CastOps
from ..supported_models import import_dotted

__all__ = ["PIXEL_SPACE", "NativeAutoencoder", "PixelSpace", "crop_to", "load_autoencoder"]

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
    """An autoencoder of ``nativedit.autoencoders``; computes in float32, as ComfyUI does on a CPU."""

    name: str
    module: torch.nn.Module
    channels: int
    compression: int
    device: torch.device

    @torch.inference_mode()
    def encode(self, pictures: torch.Tensor) -> torch.Tensor:
        pixels = crop_to(pictures, self.compression).movedim(-1, 1).to(self.device, torch.float32) * 2.0 - 1.0
        return torch.cat([self.module.encode(one) for one in pixels.split(1)]).float().cpu()

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor, tile: int | None = None) -> torch.Tensor:
        """tile: side in picture pixels of the tiles to decode in, None = in one go."""
        latents = latents.to(self.device, torch.float32)
        if tile is None:
            decoded = [self.module.decode(one) for one in latents.split(1)]
        else:
            decoded = [self.module.tiled_decode(one, tile=tile) for one in latents.split(1)]
        return _to_picture(torch.cat(decoded))


def load_autoencoder(path: str | os.PathLike, *, device: torch.device) -> tuple[torch.nn.Module, Autoencoder]:
    """The autoencoder of a file or diffusers folder, weights as stored. Raises FileError."""
    with open_source(path, component="vae") as source:
        match = find_autoencoder(source.shapes())
        if match is None:
            kind = kind_of(source.shapes())
            known = "is an autoencoder of a kind that the engine does not know; run the workflow in ComfyUI"
            raise FileError(source.path, known if kind is AUTOENCODER else wrong_slot(kind, AUTOENCODER))
        module = import_dotted(match.autoencoder.module)(**match.config, device="meta", operations=CastOps)
        expected = {key: tuple(value.shape) for key, value in module.state_dict().items()}
        state = {}
        for key in source:
            if name := match.rename(key):
                state[name] = fit_shape(source.read(key), expected[name]) if name in expected else source.read(key)
        check_keys(source.path, expected, {name: tuple(value.shape) for name, value in state.items()})
        module.load_state_dict({name: value.to(device) for name, value in state.items()}, assign=True)
        return module.requires_grad_(False).eval(), match.autoencoder
