"""Latent spaces: how many channels, how much smaller than the picture, how scaled, which colours in a preview."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentFormat:
    """stored = (raw - shift) * scale, as the diffusion model sees it.

    channels; compression: picture pixels per latent pixel, each way; rgb_factors: per channel (r, g, b) weights for
    previews, None = unknown; core: the name of the same format in ComfyUI, whose previews are better.
    """

    name: str
    channels: int
    compression: int
    scale: float = 1.0
    shift: float = 0.0
    rgb_factors: tuple[tuple[float, float, float], ...] | None = None
    core: str | None = None

    def into_model(self, raw):
        return (raw - self.shift) * self.scale

    def from_model(self, stored):
        return stored / self.scale + self.shift


_FORMATS = (
    LatentFormat("rgb", channels=3, compression=1, rgb_factors=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))),
    # FLUX.1's autoencoder: scaling_factor and shift_factor of its published config.json
    LatentFormat("flux", channels=16, compression=8, scale=0.3611, shift=0.1159, core="Flux"),
    # CogView4's own autoencoder: scaling_factor 1, shift_factor 0 in its published config.json
    LatentFormat("cogview4", channels=16, compression=8),
    # DC-AE f32c32 as Sana and PRX use it: scaling_factor of its published config.json
    LatentFormat("dc_ae_f32c32", channels=32, compression=32, scale=0.41407),
)

_BY_NAME = {latent.name: latent for latent in _FORMATS}


def get_latent_format(name: str) -> LatentFormat:
    """Raises ValueError that lists the known names."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"unknown latent format {name!r}; known: {', '.join(sorted(_BY_NAME))}") from None
