"""Latents, as ComfyUI's nodes of the same names."""

from __future__ import annotations

import math

import torch

from .declare import io
from .scale import LATENT_METHODS, resize

LARGEST = 16384


def _size(name: str, default: int, step: int):
    return io.Int.Input(name, default=default, min=16, max=LARGEST, step=step)


def _batch_size():
    return io.Int.Input("batch_size", default=1, min=1, max=4096)


class EmptyLatentImage(io.ComfyNode):
    channels, compression, default, step = 4, 8, 512, 8

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id=cls.__name__,
            inputs=[_size("width", cls.default, cls.step), _size("height", cls.default, cls.step), _batch_size()],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width, height, batch_size=1):
        samples = torch.zeros(batch_size, cls.channels, height // cls.compression, width // cls.compression)
        return io.NodeOutput({"samples": samples, "downscale_ratio_spacial": cls.compression})


class EmptySD3LatentImage(EmptyLatentImage):
    channels, compression, default, step = 16, 8, 1024, 16


class EmptyChromaRadianceLatentImage(EmptyLatentImage):
    channels, compression, default, step = 3, 1, 1024, 16


class RepeatLatentBatch(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="RepeatLatentBatch",
            inputs=[io.Latent.Input("samples"), io.Int.Input("amount", default=1, min=1, max=64)],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples, amount):
        repeated = {**samples, "samples": samples["samples"].repeat(amount, 1, 1, 1)}
        mask = samples.get("noise_mask")
        if mask is not None and mask.shape[0] > 1:
            repeated["noise_mask"] = mask.repeat(amount, 1, 1, 1)
        if "batch_index" in samples:
            index = samples["batch_index"]
            offset = max(index) - min(index) + 1
            repeated["batch_index"] = [x + i * offset for i in range(amount) for x in index]
        return io.NodeOutput(repeated)


class LatentUpscale(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LatentUpscale",
            inputs=[
                io.Latent.Input("samples"),
                io.Combo.Input("upscale_method", options=LATENT_METHODS),
                io.Int.Input("width", default=512, min=0, max=LARGEST, step=8),
                io.Int.Input("height", default=512, min=0, max=LARGEST, step=8),
                io.Combo.Input("crop", options=["disabled", "center"]),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples, upscale_method, width, height, crop):
        latent = samples["samples"]
        if not width and not height:
            return io.NodeOutput(samples)
        width = width or max(64, round(latent.shape[-1] * max(64, height) / latent.shape[-2]))
        height = height or max(64, round(latent.shape[-2] * max(64, width) / latent.shape[-1]))
        # An eighth, whatever the latent's compression is: as ComfyUI's node does.
        size = max(64, width) // 8, max(64, height) // 8
        return io.NodeOutput({**samples, "samples": resize(latent, *size, upscale_method, crop == "center")})


class LatentUpscaleBy(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="LatentUpscaleBy",
            inputs=[
                io.Latent.Input("samples"),
                io.Combo.Input("upscale_method", options=LATENT_METHODS),
                io.Float.Input("scale_by", default=1.5, min=0.01, max=8.0, step=0.01),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples, upscale_method, scale_by):
        latent = samples["samples"]
        width, height = round(latent.shape[-1] * scale_by), round(latent.shape[-2] * scale_by)
        return io.NodeOutput({**samples, "samples": resize(latent, width, height, upscale_method)})


class SetLatentNoiseMask(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SetLatentNoiseMask",
            inputs=[io.Latent.Input("samples"), io.Mask.Input("mask")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples, mask):
        return io.NodeOutput({**samples, "noise_mask": mask.reshape(-1, 1, *mask.shape[-2:])})


class VAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="VAEDecode",
            inputs=[io.Latent.Input("samples"), io.Vae.Input("vae")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples, vae):
        check_channels(samples["samples"], vae)
        return io.NodeOutput(vae.decode(samples["samples"]))


class VAEDecodeTiled(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="VAEDecodeTiled",
            inputs=[
                io.Latent.Input("samples"),
                io.Vae.Input("vae"),
                io.Int.Input("tile_size", default=512, min=64, max=4096, step=32),
                io.Int.Input("overlap", default=64, min=0, max=4096, step=32),
                io.Int.Input("temporal_size", default=64, min=8, max=4096, step=4),
                io.Int.Input("temporal_overlap", default=8, min=4, max=4096, step=4),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples, vae, tile_size, overlap, temporal_size, temporal_overlap):
        check_channels(samples["samples"], vae)
        return io.NodeOutput(vae.decode(samples["samples"], tile=tile_size))


class VAEEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="VAEEncode",
            inputs=[io.Image.Input("pixels"), io.Vae.Input("vae")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, pixels, vae):
        return io.NodeOutput({"samples": vae.encode(pixels)})


class VAEEncodeForInpaint(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="VAEEncodeForInpaint",
            inputs=[
                io.Image.Input("pixels"),
                io.Vae.Input("vae"),
                io.Mask.Input("mask"),
                io.Int.Input("grow_mask_by", default=6, min=0, max=64, step=1),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, pixels, vae, mask, grow_mask_by=6):
        size = tuple(pixels.shape[1:3])
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
        mask = torch.nn.functional.interpolate(mask, size=size, mode="bilinear")
        kept = [side // vae.compression * vae.compression for side in size]
        top, left = (side % vae.compression // 2 for side in size)
        pixels = pixels[:, top : top + kept[0], left : left + kept[1]]
        mask = mask[:, :, top : top + kept[0], left : left + kept[1]].round()
        # What will be painted over becomes grey, so that its old content does not shine through the autoencoder.
        grey = (pixels - 0.5) * (1.0 - mask).movedim(1, -1) + 0.5
        grown = mask
        if grow_mask_by:
            kernel = torch.ones(1, 1, grow_mask_by, grow_mask_by)
            grown = torch.nn.functional.conv2d(mask, kernel, padding=math.ceil((grow_mask_by - 1) / 2)).clamp(0, 1)
        grown = grown[:, :, : kept[0], : kept[1]].round()
        return io.NodeOutput({"samples": vae.encode(grey), "noise_mask": grown})


def check_channels(latent: torch.Tensor, vae) -> None:
    """Raises ValueError when a latent is not of this VAE's kind."""
    if latent.shape[1] != vae.channels:
        raise ValueError(
            f"the latent has {latent.shape[1]} channels, the VAE {vae.name} decodes {vae.channels}: "
            "load the VAE that belongs to the diffusion model"
        )


NODES = [
    EmptyLatentImage,
    EmptySD3LatentImage,
    EmptyChromaRadianceLatentImage,
    RepeatLatentBatch,
    LatentUpscale,
    LatentUpscaleBy,
    SetLatentNoiseMask,
    VAEDecode,
    VAEDecodeTiled,
    VAEEncode,
    VAEEncodeForInpaint,
]
