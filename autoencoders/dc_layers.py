"""The layers of the deep-compression autoencoder. Tensors are [B, C, H, W] throughout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..ldm.layers.linear_attention import linear_attention

EPS = 1e-5
ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "relu6": F.relu6, "gelu": F.gelu}


def activation(name: str):
    """The function a configuration names. Raises ValueError on a name it does not know."""
    if name not in ACTIVATIONS:
        raise ValueError(f"DC-AE: activation {name!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _like(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return parameter.to(device=x.device, dtype=x.dtype)


class ChannelRMSNorm(torch.nn.Module):
    """RMSNorm over the channels of a picture, with a bias."""

    def __init__(self, channels, device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x):
        weight, bias = _like(self.weight, x), _like(self.bias, x)
        if x.dtype == torch.float32:  # without turning the picture round and back: less memory at its full size
            scale = torch.rsqrt((x * x).mean(dim=1, keepdim=True) + EPS)
            return torch.addcmul(bias[:, None, None], x * scale, weight[:, None, None])
        return (F.rms_norm(x.movedim(1, -1), x.shape[1:2], weight, EPS) + bias).movedim(-1, 1)


class BatchNorm(torch.nn.BatchNorm2d):
    """Batch normalisation with the stored statistics: a published autoencoder is used, not trained."""

    def forward(self, x):
        statistics = (_like(self.running_mean, x), _like(self.running_var, x))
        return F.batch_norm(x, *statistics, _like(self.weight, x), _like(self.bias, x), False, 0.0, self.eps)


NORMS = {
    "rms_norm": ChannelRMSNorm,
    "batch_norm": lambda channels, **factory: BatchNorm(channels, eps=EPS, **factory),
}


def group_mean(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Fewer channels: the mean of each run of neighbours."""
    return x.unflatten(1, (channels, -1)).mean(dim=2)


def expand(x: torch.Tensor, channels: int) -> torch.Tensor:
    """More channels: each one repeated, copies beside each other."""
    return x.repeat_interleave(channels // x.shape[1], dim=1, output_size=channels)


class DownBlock(torch.nn.Module):
    """Half the size. ``unshuffle``: convolve, then move pixels into channels; else a convolution of stride 2."""

    def __init__(self, in_channels, out_channels, unshuffle, shortcut, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.unshuffle = unshuffle
        self.shortcut = shortcut
        self.out_channels = out_channels
        made, stride = (out_channels // 4, 1) if unshuffle else (out_channels, 2)
        self.conv = operations.Conv2d(in_channels, made, 3, stride=stride, padding=1, device=device, dtype=dtype)

    def forward(self, x):
        out = self.conv(x)
        if self.unshuffle:
            out = F.pixel_unshuffle(out, 2)
        return out + group_mean(F.pixel_unshuffle(x, 2), self.out_channels) if self.shortcut else out


class UpBlock(torch.nn.Module):
    """Twice the size. ``interpolate``: repeat pixels, then convolve; else convolve and move channels into pixels."""

    def __init__(self, in_channels, out_channels, interpolate, shortcut, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.interpolate = interpolate
        self.shortcut = shortcut
        self.out_channels = out_channels
        made = out_channels if interpolate else 4 * out_channels
        self.conv = operations.Conv2d(in_channels, made, 3, padding=1, device=device, dtype=dtype)

    def forward(self, x):
        if self.interpolate:
            out = self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))
        else:
            out = F.pixel_shuffle(self.conv(x), 2)
        # Added in place: the last levels are the decoder's largest tensors.
        return out.add_(F.pixel_shuffle(expand(x, 4 * self.out_channels), 2)) if self.shortcut else out


class ResBlock(torch.nn.Module):
    def __init__(self, channels, norm_type, act_fn, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.activation = activation(act_fn)
        self.conv1 = operations.Conv2d(channels, channels, 3, padding=1, **factory)
        self.conv2 = operations.Conv2d(channels, channels, 3, padding=1, bias=False, **factory)
        self.norm = NORMS[norm_type](channels, **factory)

    def forward(self, x):
        return self.norm(self.conv2(self.activation(self.conv1(x)))).add_(x)


class QKVFilter(torch.nn.Module):
    """Queries, keys and values of a wider neighbourhood: depthwise filters, then a mix inside each head."""

    def __init__(self, channels, head_dim, kernel_size, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype, "bias": False}
        self.proj_in = operations.Conv2d(
            channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, **factory
        )
        self.proj_out = operations.Conv2d(channels, channels, 1, groups=channels // head_dim, **factory)

    def forward(self, x):
        return self.proj_out(self.proj_in(x))


class MultiscaleLinearAttention(torch.nn.Module):
    """Linear attention whose heads are cut from queries, keys, values and their filtered versions in a row."""

    def __init__(self, channels, head_dim, kernel_sizes, norm_type, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = channels // head_dim * head_dim
        self.head_dim = head_dim
        self.to_q = operations.Linear(channels, inner, bias=False, **factory)
        self.to_k = operations.Linear(channels, inner, bias=False, **factory)
        self.to_v = operations.Linear(channels, inner, bias=False, **factory)
        self.to_qkv_multiscale = torch.nn.ModuleList(
            QKVFilter(3 * inner, head_dim, size, operations=operations, **factory) for size in kernel_sizes
        )
        self.to_out = operations.Linear(inner * (1 + len(kernel_sizes)), channels, bias=False, **factory)
        self.norm_out = NORMS[norm_type](channels, **factory)

    def forward(self, x):
        rows, columns = x.shape[-2:]
        pixels = x.movedim(1, -1)
        qkv = torch.cat((self.to_q(pixels), self.to_k(pixels), self.to_v(pixels)), dim=-1)
        wider = [scale(qkv.movedim(-1, 1)).movedim(1, -1) for scale in self.to_qkv_multiscale]
        # The reference takes another order of products for small pictures; the values are the same.
        heads = torch.cat((qkv, *wider), dim=-1).flatten(1, 2).unflatten(-1, (-1, 3, self.head_dim))
        out = self.to_out(linear_attention(*heads.unbind(3)))
        return self.norm_out(out.unflatten(1, (rows, columns)).movedim(-1, 1)) + x


class GLUMBConv(torch.nn.Module):
    """1x1 convolution to 8 times the channels, depthwise 3x3, gate, 1x1 convolution, norm."""

    def __init__(self, channels, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        wide = 8 * channels
        self.conv_inverted = operations.Conv2d(channels, wide, 1, **factory)
        self.conv_depth = operations.Conv2d(wide, wide, 3, padding=1, groups=wide, **factory)
        self.conv_point = operations.Conv2d(wide // 2, channels, 1, bias=False, **factory)
        self.norm = ChannelRMSNorm(channels, **factory)

    def forward(self, x):
        out, gate = self.conv_depth(F.silu(self.conv_inverted(x))).chunk(2, dim=1)
        return self.norm(self.conv_point(out * F.silu(gate))) + x


class EfficientViTBlock(torch.nn.Module):
    def __init__(self, channels, head_dim, kernel_sizes, norm_type, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype, "operations": operations}
        self.attn = MultiscaleLinearAttention(channels, head_dim, kernel_sizes, norm_type, **factory)
        self.conv_out = GLUMBConv(channels, **factory)

    def forward(self, x):
        return self.conv_out(self.attn(x))


def build_block(kind, channels, head_dim, kernel_sizes, norm_type, act_fn, operations, factory) -> torch.nn.Module:
    """One block of a level, by the name its configuration gives. Raises ValueError on a name it does not know."""
    if norm_type not in NORMS:
        raise ValueError(f"DC-AE: norm {norm_type!r} is unknown; known are {', '.join(NORMS)}")
    if kind == "ResBlock":
        return ResBlock(channels, norm_type, act_fn, operations=operations, **factory)
    if kind == "EfficientViTBlock":
        return EfficientViTBlock(channels, head_dim, kernel_sizes, norm_type, operations=operations, **factory)
    raise ValueError(f"DC-AE: block type {kind!r} is unknown; known are ResBlock and EfficientViTBlock")
