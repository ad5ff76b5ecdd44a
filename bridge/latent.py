"""Our latent formats as ComfyUI's."""

from __future__ import annotations

import functools

import comfy.latent_formats

from ..latent_formats import LatentFormat, get_latent_format


@functools.cache
def latent_format_class(name: str) -> type[comfy.latent_formats.LatentFormat]:
    """ComfyUI's own class where it has the format (its previews are better), else one made from our description."""
    ours = get_latent_format(name)
    core = vars(comfy.latent_formats).get(ours.core)
    return core or type(f"NativeDiT_{name}", (_Described,), _attributes(ours))


def _attributes(ours: LatentFormat) -> dict:
    return {
        "nativedit": ours,
        "latent_channels": ours.channels,
        "spacial_downscale_ratio": ours.compression,  # ComfyUI's spelling
        "scale_factor": ours.scale,
        "shift_factor": ours.shift,
        "latent_rgb_factors": None if ours.rgb_factors is None else [list(row) for row in ours.rgb_factors],
    }


class _Described(comfy.latent_formats.LatentFormat):
    nativedit: LatentFormat

    def process_in(self, latent):
        return self.nativedit.into_model(latent)

    def process_out(self, latent):
        return self.nativedit.from_model(latent)
