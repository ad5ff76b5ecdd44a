"""Latents, as ComfyUI's nodes of the same names."""

from __future__ import annotations

import torch

from .declare import io

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


def check_channels(latent: torch.Tensor, vae) -> None:
    """Raises ValueError when a latent is not of this VAE's kind."""
    if latent.shape[1] != vae.channels:
        raise ValueError(
            f"the latent has {latent.shape[1]} channels, the VAE {vae.name} decodes {vae.channels}: "
            "load the VAE that belongs to the diffusion model"
        )


NODES = [EmptyLatentImage, EmptySD3LatentImage, EmptyChromaRadianceLatentImage, VAEDecode]
