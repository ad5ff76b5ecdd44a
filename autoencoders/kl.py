"""The variational autoencoder of latent diffusion, with its relatives: one module with options.

Keys and constructor arguments are those of the published layout.
"""
# FLUX's, CogView4's and so on, in the layout of diffusers.
# Facts: diffusers' AutoencoderKL 0.42.1, compared with it beside ours.

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ldm.layers.attention import sdpa
from .tiling import run_in_tiles, tile_sizes

EPS = 1e-6


class ResnetBlock(torch.nn.Module):
    def __init__(self, in_channels, out_channels, groups, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.norm1 = operations.GroupNorm(groups, in_channels, eps=EPS, **factory)
        self.conv1 = operations.Conv2d(in_channels, out_channels, 3, padding=1, **factory)
        self.norm2 = operations.GroupNorm(groups, out_channels, eps=EPS, **factory)
        self.conv2 = operations.Conv2d(out_channels, out_channels, 3, padding=1, **factory)
        self.conv_shortcut = (
            operations.Conv2d(in_channels, out_channels, 1, **factory) if in_channels != out_channels else None
        )

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class AttentionBlock(torch.nn.Module):
    """One head over all pixels."""

    def __init__(self, channels, groups, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.group_norm = operations.GroupNorm(groups, channels, eps=EPS, **factory)
        self.to_q = operations.Linear(channels, channels, **factory)
        self.to_k = operations.Linear(channels, channels, **factory)
        self.to_v = operations.Linear(channels, channels, **factory)
        self.to_out = torch.nn.ModuleList([operations.Linear(channels, channels, **factory)])

    def forward(self, x):
        tokens = self.group_norm(x.flatten(2)).transpose(1, 2)
        q, k, v = (project(tokens)[:, None] for project in (self.to_q, self.to_k, self.to_v))
        # Not through the attention seam: the fast backends that hosts plug in there end at 256 channels per head.
        out = self.to_out[0](sdpa(q, k, v))
        return x + out.transpose(1, 2).unflatten(2, x.shape[2:])


class Downsample(torch.nn.Module):
    def __init__(self, channels, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.conv = operations.Conv2d(channels, channels, 3, stride=2, device=device, dtype=dtype)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(torch.nn.Module):
    def __init__(self, channels, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.conv = operations.Conv2d(channels, channels, 3, padding=1, device=device, dtype=dtype)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class DownBlock(torch.nn.Module):
    def __init__(self, in_channels, out_channels, layers, groups, last, **factory):
        super().__init__()
        self.resnets = torch.nn.ModuleList(
            ResnetBlock(out_channels if i else in_channels, out_channels, groups, **factory) for i in range(layers)
        )
        self.downsamplers = torch.nn.ModuleList([] if last else [Downsample(out_channels, **factory)])

    def forward(self, x):
        for layer in (*self.resnets, *self.downsamplers):
            x = layer(x)
        return x


class UpBlock(torch.nn.Module):
    def __init__(self, in_channels, out_channels, layers, groups, last, **factory):
        super().__init__()
        self.resnets = torch.nn.ModuleList(
            ResnetBlock(out_channels if i else in_channels, out_channels, groups, **factory) for i in range(layers)
        )
        self.upsamplers = torch.nn.ModuleList([] if last else [Upsample(out_channels, **factory)])

    def forward(self, x):
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x)
        return x


class MidBlock(torch.nn.Module):
    def __init__(self, channels, groups, attention, **factory):
        super().__init__()
        self.resnets = torch.nn.ModuleList(ResnetBlock(channels, channels, groups, **factory) for _ in range(2))
        self.attentions = torch.nn.ModuleList([AttentionBlock(channels, groups, **factory)] if attention else [])

    def forward(self, x):
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        return self.resnets[1](x)


class Encoder(torch.nn.Module):
    def __init__(self, in_channels, out_channels, widths, layers, groups, attention, **factory):
        super().__init__()
        operations, at = factory["operations"], {k: factory[k] for k in ("device", "dtype")}
        self.conv_in = operations.Conv2d(in_channels, widths[0], 3, padding=1, **at)
        self.down_blocks = torch.nn.ModuleList(
            DownBlock(widths[max(i - 1, 0)], width, layers, groups, i == len(widths) - 1, **factory)
            for i, width in enumerate(widths)
        )
        self.mid_block = MidBlock(widths[-1], groups, attention, **factory)
        self.conv_norm_out = operations.GroupNorm(groups, widths[-1], eps=EPS, **at)
        self.conv_out = operations.Conv2d(widths[-1], out_channels, 3, padding=1, **at)

    def forward(self, x):
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class Decoder(torch.nn.Module):
    def __init__(self, in_channels, out_channels, widths, layers, groups, attention, **factory):
        super().__init__()
        operations, at = factory["operations"], {k: factory[k] for k in ("device", "dtype")}
        widths = widths[::-1]
        self.conv_in = operations.Conv2d(in_channels, widths[0], 3, padding=1, **at)
        self.mid_block = MidBlock(widths[0], groups, attention, **factory)
        self.up_blocks = torch.nn.ModuleList(
            UpBlock(widths[max(i - 1, 0)], width, layers, groups, i == len(widths) - 1, **factory)
            for i, width in enumerate(widths)
        )
        self.conv_norm_out = operations.GroupNorm(groups, widths[-1], eps=EPS, **at)
        self.conv_out = operations.Conv2d(widths[-1], out_channels, 3, padding=1, **at)

    def forward(self, x):
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class AutoencoderKL(torch.nn.Module):
    """It encodes pixels from -1 to 1 into raw latents, whose sides are smaller by the compression, and decodes them.

    The factors of scale and shift are what the published configuration says about the latents; they are kept for hosts
    and not applied here, because what a diffusion model sees is its latent format's business.
    """

    # Pixels: [B, C, H, W]; latents: [B, latent_channels, H / compression, W / compression]. `sample_size` is the tile
    # of `tiled_encode` and `tiled_decode` in pixels; `force_upcast` asks the host for float32.

    def __init__(
        self,
        in_channels=3,
        out_channels=3,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        norm_num_groups=32,
        sample_size=1024,
        scaling_factor=1.0,
        shift_factor=None,
        force_upcast=True,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=True,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__()
        widths = tuple(block_out_channels)
        if any(width % norm_num_groups for width in widths):
            raise ValueError(
                f"AutoencoderKL: block_out_channels {list(widths)} can't be normalised in {norm_num_groups} groups; "
                "give norm_num_groups"
            )
        self.dtype = dtype
        self.latent_channels = latent_channels
        self.compression = 2 ** (len(widths) - 1)
        self.sample_size = sample_size
        self.scaling_factor = scaling_factor
        self.shift_factor = shift_factor or 0.0
        self.force_upcast = force_upcast
        at = {"device": device, "dtype": dtype}
        options = (widths, layers_per_block, norm_num_groups, mid_block_add_attention)
        moments = 2 * latent_channels
        self.encoder = Encoder(in_channels, moments, *options, operations=operations, **at)
        options = (widths, layers_per_block + 1, norm_num_groups, mid_block_add_attention)
        self.decoder = Decoder(latent_channels, out_channels, *options, operations=operations, **at)
        self.quant_conv = operations.Conv2d(moments, moments, 1, **at) if use_quant_conv else None
        self.post_quant_conv = (
            operations.Conv2d(latent_channels, latent_channels, 1, **at) if use_post_quant_conv else None
        )

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """x: pixels, height and width multiples of ``compression``. Returns the mean of the posterior."""
        return self._moments(x).chunk(2, dim=1)[0]

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """z: raw latents. Returns pixels, not clamped."""
        return self.decoder(z if self.post_quant_conv is None else self.post_quant_conv(z))

    def tiled_encode(self, x: torch.Tensor, *, tile: int | None = None, overlap: float = 0.25) -> torch.Tensor:
        """``encode`` in tiles of ``tile`` pixels (default ``sample_size``) that overlap by a fraction of their size.

        Each tile is normalised on its own, so the result is near ``encode``'s, not equal. Raises ValueError on a tile
        or overlap that can't work.
        """
        size, stride, blend = tile_sizes(tile or self.sample_size, overlap, self.compression)
        c = self.compression
        moments = run_in_tiles(self._moments, x, tile=size * c, stride=stride * c, blend=blend, keep=stride)
        return moments.chunk(2, dim=1)[0]

    def tiled_decode(self, z: torch.Tensor, *, tile: int | None = None, overlap: float = 0.25) -> torch.Tensor:
        """``decode`` in tiles; see ``tiled_encode``. ``tile`` is in picture pixels here too."""
        size, stride, blend = tile_sizes(tile or self.sample_size, overlap, self.compression)
        c = self.compression
        return run_in_tiles(self.decode, z, tile=size, stride=stride, blend=blend * c, keep=stride * c)

    def _moments(self, x: torch.Tensor) -> torch.Tensor:
        moments = self.encoder(x)
        return moments if self.quant_conv is None else self.quant_conv(moments)
