"""Latent spaces: how many channels, how much smaller than the picture, how scaled, which colours in a preview."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LatentFormat:
    """stored = (raw - shift) * scale, as the diffusion model sees it; either may be one number per channel.

    channels; compression: picture pixels per latent pixel, each way; rgb_factors: per channel (r, g, b) weights for
    previews, None = unknown; core: the name of the same format in ComfyUI, whose previews are better.
    """

    name: str
    channels: int
    compression: int
    scale: float | tuple[float, ...] = 1.0
    shift: float | tuple[float, ...] = 0.0
    rgb_factors: tuple[tuple[float, float, float], ...] | None = None
    core: str | None = None

    def into_model(self, raw):
        return (raw - _per_channel(self.shift, raw)) * _per_channel(self.scale, raw)

    def from_model(self, stored):
        return stored / _per_channel(self.scale, stored) + _per_channel(self.shift, stored)


def _per_channel(value: float | tuple[float, ...], latent: torch.Tensor) -> float | torch.Tensor:
    """As it multiplies [B, C, ...]."""
    if isinstance(value, float):
        return value
    return torch.tensor(value, dtype=latent.dtype, device=latent.device).view(-1, *(1,) * (latent.ndim - 2))


# latents_mean and latents_std of the autoencoder's published config.json, Wan 2.1's and Qwen-Image's alike
_WAN21_MEAN = (
    *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
    *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
)
_WAN21_STD = (
    *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
    *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
)

_FORMATS = (
    LatentFormat("rgb", channels=3, compression=1, rgb_factors=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))),
    # FLUX.1's autoencoder: scaling_factor and shift_factor of its published config.json
    LatentFormat("flux", channels=16, compression=8, scale=0.3611, shift=0.1159, core="Flux"),
    # CogView4's own autoencoder: scaling_factor 1, shift_factor 0 in its published config.json
    LatentFormat("cogview4", channels=16, compression=8),
    # DC-AE f32c32 as Sana and PRX use it: scaling_factor of its published config.json
    LatentFormat("dc_ae_f32c32", channels=32, compression=32, scale=0.41407),
    LatentFormat(
        "wan21",
        channels=16,
        compression=8,
        scale=tuple(1 / std for std in _WAN21_STD),
        shift=_WAN21_MEAN,
        core="Wan21",
    ),
)

_BY_NAME = {latent.name: latent for latent in _FORMATS}


def get_latent_format(name: str) -> LatentFormat:
    """Raises ValueError that lists the known names."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"unknown latent format {name!r}; known: {', '.join(sorted(_BY_NAME))}") from None
