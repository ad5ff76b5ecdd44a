"""F-Lite's maths written down plainly, in one function and in the precision of its weights.

The reference itself can't be installed beside the tests (its licence and its imports), so random configurations are
compared with this reading; the recordings of the reference judge both.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

EPS = 1e-6


def rms(x, weight=None):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return y if weight is None else y * weight


def attend(q, k, v):
    """Softmax attention of [B, H, L, D], heads joined."""
    out = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v
    return out.transpose(1, 2).flatten(2)


def forward(w, config, x, timesteps, context):
    """w: the state dict; x: [B, C, H, W]; timesteps: [B]; context: [B, L, D_text]. Returns [B, C, H, W]."""
    dtype, heads, p = w["register_tokens"].dtype, config["num_heads"], config["patch_size"]
    dim = config["hidden_size"]
    half = dim // heads // 2
    x, context = x.to(dtype), context.to(dtype)

    def linear(name, value):
        return F.linear(value, w[name + ".weight"], w.get(name + ".bias"))

    def split(value):
        return value.reshape(*value.shape[:2], heads, -1).transpose(1, 2)

    # The sinusoids and the angles are float32 whatever the weights are.
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(dim // 2, dtype=torch.float32) / (dim // 2))
    angle = (1000.0 * timesteps.float())[:, None] * frequencies
    c = linear("time_embed.2", F.silu(linear("time_embed.0", torch.cat((angle.cos(), angle.sin()), -1).to(dtype))))

    patches = F.conv2d(x, w["patch_embed.patch_proj.weight"], w["patch_embed.patch_proj.bias"], stride=p)
    rows, columns = patches.shape[-2:]
    registers = w["register_tokens"].expand(x.shape[0], -1, -1)
    h = torch.cat((registers, patches.flatten(2).transpose(1, 2)), dim=1)

    per_axis = torch.tensor([config["rope_base"] ** (-i / half) for i in range(0, half, 2)], dtype=torch.float32)
    row = torch.arange(rows)[:, None].expand(rows, columns).reshape(-1, 1) * per_axis
    column = torch.arange(columns)[None].expand(rows, columns).reshape(-1, 1) * per_axis
    theta = torch.cat((row, column), dim=-1)
    theta = torch.cat((torch.zeros(registers.shape[1], half), theta))
    cos, sin = theta.cos().to(dtype), theta.sin().to(dtype)

    def turn(value):
        a, b = value.chunk(2, dim=-1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)

    first_v = None
    for i in range(config["depth"]):
        block = f"blocks.{i}."
        modulation = linear(block + "adaLN_modulation.1", F.silu(c))[:, None].chunk(9, dim=-1)

        def modulated(number, block=block, modulation=modulation):
            shift, scale = modulation[3 * number], modulation[3 * number + 1]
            return rms(h, w.get(f"{block}norm{number + 1}.weight")) * (1 + scale) + shift  # noqa: B023

        q, k, v = (split(part) for part in linear(block + "self_attn.qkv", modulated(0)).chunk(3, dim=-1))
        if first_v is None:
            first_v = v
        elif config["residual_v"]:
            share = w[block + "self_attn.lambda_param"]
            v = share * v + (1 - share) * first_v
        h = h + linear(block + "self_attn.proj", attend(rms(turn(q)), rms(turn(k)), v)) * modulation[2]

        q = split(linear(block + "cross_attn.q", modulated(1)))
        k, v = (split(part) for part in linear(block + "cross_attn.context_kv", context).chunk(2, dim=-1))
        h = h + linear(block + "cross_attn.proj", attend(rms(q), rms(k), v)) * modulation[5]

        h = h + linear(block + "mlp.2", F.gelu(linear(block + "mlp.0", modulated(2)))) * modulation[8]

    shift, scale = linear("final_modulation.1", F.silu(c))[:, None].chunk(2, dim=-1)
    out = rms(h[:, registers.shape[1] :], w.get("final_norm.weight")) * (1 + scale) + shift
    out = linear("final_proj", out).reshape(x.shape[0], rows, columns, p, p, -1)
    return out.permute(0, 5, 1, 3, 2, 4).reshape(x.shape)
