"""The deep-compression autoencoder: latents that are far smaller than the picture each way, and nothing random.

Resampling carries shortcuts that move pixels into channels and back; deep levels have linear attention with small
depthwise filters on queries, keys and values. Keys and constructor arguments are those of the published layout.
"""
# DC-AE (MIT HAN Lab): 32 to 128 times smaller each way, no KL. The published layout is that of diffusers.
# Facts: arXiv 2410.10733 and diffusers' AutoencoderDC 0.42.1, compared with it beside ours.

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dc_layers import ChannelRMSNorm, DownBlock, UpBlock, activation, build_block, expand, group_mean
from .tiling import run_in_tiles, tile_sizes


def per_level(value: str | Sequence[str], levels: int) -> tuple[str, ...]:
    """A setting given once for all levels, or one per level."""
    return (value,) * levels if isinstance(value, str) else tuple(value)


class Encoder(torch.nn.Module):
    def __init__(
        self,
        in_channels,
        latent_channels,
        head_dim,
        block_types,
        widths,
        layers,
        multiscales,
        downsample,
        out_shortcut,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        unshuffle = downsample == "pixel_unshuffle"
        if layers[0] > 0:
            self.conv_in = operations.Conv2d(in_channels, widths[0], 3, padding=1, **factory)
        else:  # the first level is nothing but a downsampling
            self.conv_in = DownBlock(in_channels, widths[1], unshuffle, False, operations=operations, **factory)
        self.down_blocks = torch.nn.ModuleList()
        for level, (width, count) in enumerate(zip(widths, layers, strict=True)):
            blocks = [
                build_block(
                    block_types[level], width, head_dim, multiscales[level], "rms_norm", "silu", operations, factory
                )
                for _ in range(count)
            ]
            if level < len(widths) - 1 and count > 0:
                blocks.append(DownBlock(width, widths[level + 1], unshuffle, True, operations=operations, **factory))
            self.down_blocks.append(torch.nn.Sequential(*blocks))
        self.conv_out = operations.Conv2d(widths[-1], latent_channels, 3, padding=1, **factory)
        self.out_shortcut = out_shortcut

    def forward(self, x):
        x = self.conv_in(x)
        for level in self.down_blocks:
            x = level(x)
        z = self.conv_out(x)
        return z + group_mean(x, z.shape[1]) if self.out_shortcut else z


class Decoder(torch.nn.Module):
    def __init__(
        self,
        out_channels,
        latent_channels,
        head_dim,
        block_types,
        widths,
        layers,
        multiscales,
        norm_types,
        act_fns,
        upsample,
        in_shortcut,
        conv_act_fn,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        interpolate = upsample == "interpolate"
        self.conv_in = operations.Conv2d(latent_channels, widths[-1], 3, padding=1, **factory)
        self.in_shortcut = in_shortcut
        self.up_blocks = torch.nn.ModuleList()
        for level, (width, count) in enumerate(zip(widths, layers, strict=True)):
            blocks = []
            if level < len(widths) - 1 and count > 0:
                blocks.append(UpBlock(widths[level + 1], width, interpolate, True, operations=operations, **factory))
            blocks += [
                build_block(
                    block_types[level],
                    width,
                    head_dim,
                    multiscales[level],
                    norm_types[level],
                    act_fns[level],
                    operations,
                    factory,
                )
                for _ in range(count)
            ]
            self.up_blocks.append(torch.nn.Sequential(*blocks))
        last = widths[0] if layers[0] > 0 else widths[1]
        self.norm_out = ChannelRMSNorm(last, **factory)
        self.conv_act = activation(conv_act_fn)
        if layers[0] > 0:
            self.conv_out = operations.Conv2d(last, out_channels, 3, padding=1, **factory)
        else:
            self.conv_out = UpBlock(last, out_channels, interpolate, False, operations=operations, **factory)

    def forward(self, z):
        x = self.conv_in(z)
        if self.in_shortcut:
            x = x + expand(z, x.shape[1])
        for level in reversed(self.up_blocks):
            x = level(x)
        return self.conv_out(self.conv_act(self.norm_out(x)))


class AutoencoderDC(torch.nn.Module):
    """It encodes pixels into raw latents and decodes latents into pixels; each level but the first halves both sides.

    The scaling factor is what the published configuration says about the latents; it is kept for hosts and not applied
    here, because what a diffusion model sees is its latent format's business.
    """

    # Pixels: [B, 3, H, W] in [-1, 1]; latents: [B, latent_channels, H / c, W / c], c being `compression`.

    def __init__(
        self,
        in_channels=3,
        latent_channels=32,
        attention_head_dim=32,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(128, 256, 512, 512, 1024, 1024),
        decoder_block_out_channels=(128, 256, 512, 512, 1024, 1024),
        encoder_layers_per_block=(2, 2, 2, 3, 3, 3),
        decoder_layers_per_block=(3, 3, 3, 3, 3, 3),
        encoder_qkv_multiscales=((), (), (), (5,), (5,), (5,)),
        decoder_qkv_multiscales=((), (), (), (5,), (5,), (5,)),
        upsample_block_type="pixel_shuffle",
        downsample_block_type="pixel_unshuffle",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        encoder_out_shortcut=True,
        decoder_in_shortcut=True,
        decoder_conv_act_fn="relu",
        scaling_factor=1.0,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__()
        levels = len(encoder_block_out_channels)
        if len(decoder_block_out_channels) != levels:
            raise ValueError(
                f"DC-AE: {levels} levels down (encoder_block_out_channels) and {len(decoder_block_out_channels)} up "
                "(decoder_block_out_channels); pictures would come back in another size"
            )
        factory = {"device": device, "dtype": dtype, "operations": operations}
        self.compression = 2 ** (levels - 1)
        self.scaling_factor = scaling_factor
        self.encoder = Encoder(
            in_channels,
            latent_channels,
            attention_head_dim,
            per_level(encoder_block_types, levels),
            tuple(encoder_block_out_channels),
            tuple(encoder_layers_per_block),
            encoder_qkv_multiscales,
            downsample_block_type,
            encoder_out_shortcut,
            **factory,
        )
        self.decoder = Decoder(
            in_channels,
            latent_channels,
            attention_head_dim,
            per_level(decoder_block_types, levels),
            tuple(decoder_block_out_channels),
            tuple(decoder_layers_per_block),
            decoder_qkv_multiscales,
            per_level(decoder_norm_types, levels),
            per_level(decoder_act_fns, levels),
            upsample_block_type,
            decoder_in_shortcut,
            decoder_conv_act_fn,
            **factory,
        )

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Pixels from -1 to 1 as raw latents. Raises ValueError unless the compression divides height and width."""
        self._check_size(x)
        return self.encoder(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """z: raw latents, any size. Returns pixels, not clamped."""
        return self.decoder(z)

    def tiled_encode(self, x: torch.Tensor, *, tile: int = 512, overlap: float = 0.125) -> torch.Tensor:
        """``encode`` in tiles of ``tile`` pixels that overlap by a fraction of their size; the defaults are diffusers'.

        Attention sees one tile at a time, so the result is near ``encode``'s, not equal. Raises ValueError on a tile,
        overlap or picture size that can't work.
        """
        self._check_size(x)
        size, stride, blend = tile_sizes(tile, overlap, self.compression)
        c = self.compression
        return run_in_tiles(self.encoder, x, tile=size * c, stride=stride * c, blend=blend, keep=stride)

    def tiled_decode(self, z: torch.Tensor, *, tile: int = 512, overlap: float = 0.125) -> torch.Tensor:
        """``decode`` in tiles; see ``tiled_encode``. ``tile`` is in picture pixels here too."""
        size, stride, blend = tile_sizes(tile, overlap, self.compression)
        c = self.compression
        return run_in_tiles(self.decoder, z, tile=size, stride=stride, blend=blend * c, keep=stride * c)

    def _check_size(self, x: torch.Tensor) -> None:
        height, width = x.shape[-2:]
        if height % self.compression or width % self.compression:
            raise ValueError(
                f"DC-AE: a picture of {width}x{height} pixels is not a whole number of latent pixels; "
                f"crop or resize it to multiples of {self.compression}"
            )
