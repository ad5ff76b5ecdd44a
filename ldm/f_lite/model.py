"""F-Lite (Freepik and fal): image and register tokens attend to themselves, then to the text.

Keys and constructor arguments are those of the published checkpoints. Facts: the published checkpoints' keys and
shapes and recordings of the reference (fal-ai/f-lite at 85f0471); verified stage by stage against those recordings.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..layers.attention import attention
from ..layers.dit import BlockLoop, DiffusionTransformer
from ..layers.embeddings import grid_rope, rotate_halves, sinusoidal_embedding
from ..layers.patches import pad_to_patch_size

EPS = 1e-6
REGISTERS = 16
# The token count (1024 image tokens and the registers) whose attention the dynamic softmax temperature leaves alone.
TEMPERATURE_TOKENS = 1040
# Large tables that checkpoints may carry. They are computed anew: the stored ones are rounded to the file's precision.
ROPE_BUFFERS = ("rope.freqs_hw_cos", "rope.freqs_hw_sin")


def norm_heads(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm without weights over each head's channels."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x: [B, L, D]; shift, scale: [B, 1, D]."""
    return torch.addcmul(shift, x, 1 + scale)


class PatchEmbed(torch.nn.Module):
    def __init__(self, in_channels, dim, patch_size, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.patch_proj = operations.Conv2d(in_channels, dim, patch_size, stride=patch_size, device=device, dtype=dtype)

    def forward(self, x):
        """[B, C, H, W] -> [B, H/p * W/p, dim], row by row."""
        return self.patch_proj(x).flatten(2).transpose(1, 2)


class SelfAttention(torch.nn.Module):
    """Heads are turned, then normalised. From the second block on, values are mixed with the first block's."""

    def __init__(self, dim, heads, bias, residual_v, temperature, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.heads = heads
        self.temperature = temperature
        self.qkv = operations.Linear(dim, 3 * dim, bias=bias, device=device, dtype=dtype)
        self.proj = operations.Linear(dim, dim, bias=False, device=device, dtype=dtype)
        self.lambda_param = torch.nn.Parameter(torch.ones(1, device=device, dtype=dtype)) if residual_v else None

    def forward(self, x, pe, first_v=None, transformer_options=None):
        """first_v: the first block's values [B, L, H, D], None in the first block. Returns result and values."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.lambda_param is not None and first_v is not None:
            v = torch.lerp(first_v, v, self.lambda_param.to(v))
        q, k = rotate_halves(q, pe), rotate_halves(k, pe)
        if self.temperature:
            k = k * math.sqrt(math.log(k.shape[1]) / math.log(TEMPERATURE_TOKENS))
        out = attention(
            norm_heads(q).transpose(1, 2),
            norm_heads(k).transpose(1, 2),
            v.transpose(1, 2),
            transformer_options=transformer_options,
        )
        return self.proj(out), v


class CrossAttention(torch.nn.Module):
    def __init__(self, dim, context_dim, heads, bias, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.heads = heads
        self.q = operations.Linear(dim, dim, bias=bias, device=device, dtype=dtype)
        self.context_kv = operations.Linear(context_dim, 2 * dim, bias=bias, device=device, dtype=dtype)
        self.proj = operations.Linear(dim, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x, txt, attn_mask=None, transformer_options=None):
        q = self.q(x).unflatten(-1, (self.heads, -1))
        k, v = self.context_kv(txt).unflatten(-1, (2, self.heads, -1)).unbind(2)
        out = attention(
            norm_heads(q).transpose(1, 2),
            norm_heads(k).transpose(1, 2),
            v.transpose(1, 2),
            mask=attn_mask,
            transformer_options=transformer_options,
        )
        return self.proj(out)


class FLiteBlock(torch.nn.Module):
    def __init__(
        self,
        dim,
        heads,
        context_dim,
        mlp_ratio,
        bias_and_rms,
        residual_v,
        temperature,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__()
        at = {"device": device, "dtype": dtype}
        inner = int(dim * mlp_ratio)
        self.norm1 = operations.RMSNorm(dim, eps=EPS, elementwise_affine=bias_and_rms, **at)
        self.self_attn = SelfAttention(dim, heads, bias_and_rms, residual_v, temperature, operations=operations, **at)
        self.norm2 = operations.RMSNorm(dim, eps=EPS, elementwise_affine=bias_and_rms, **at)
        self.cross_attn = CrossAttention(dim, context_dim, heads, bias_and_rms, operations=operations, **at)
        self.norm3 = operations.RMSNorm(dim, eps=EPS, elementwise_affine=bias_and_rms, **at)
        self.mlp = torch.nn.Sequential(
            operations.Linear(dim, inner, **at), torch.nn.GELU(), operations.Linear(inner, dim, **at)
        )
        self.adaLN_modulation = torch.nn.Sequential(torch.nn.SiLU(), operations.Linear(dim, 9 * dim, **at))

    def forward(self, img, txt, vec, pe, first_v=None, attn_mask=None, transformer_options=None):
        (
            shift_self,
            scale_self,
            gate_self,
            shift_cross,
            scale_cross,
            gate_cross,
            shift_mlp,
            scale_mlp,
            gate_mlp,
        ) = self.adaLN_modulation(vec)[:, None].chunk(9, dim=-1)
        x, v = self.self_attn(modulate(self.norm1(img), shift_self, scale_self), pe, first_v, transformer_options)
        img = torch.addcmul(img, gate_self, x)
        x = self.cross_attn(modulate(self.norm2(img), shift_cross, scale_cross), txt, attn_mask, transformer_options)
        img = torch.addcmul(img, gate_cross, x)
        x = self.mlp(modulate(self.norm3(img), shift_mlp, scale_mlp))
        return {"img": torch.addcmul(img, gate_mlp, x), "first_v": v if first_v is None else first_v}


class FLiteTransformer(DiffusionTransformer):
    """``dynamic_softmax_temperature`` scales keys before they are normalised, so it changes next to nothing, as in the
    reference. Its variant without rotary positions (``use_rope=False``) does not run there and is refused."""

    repeated_blocks = ("FLiteBlock",)

    def __init__(
        self,
        in_channels=16,
        patch_size=2,
        hidden_size=3072,
        depth=40,
        num_heads=12,
        mlp_ratio=4.0,
        cross_attn_input_size=4096,
        residual_v=True,
        train_bias_and_rms=False,
        use_rope=True,
        gradient_checkpoint=False,
        dynamic_softmax_temperature=False,
        rope_base=10000,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__(dtype)
        if not use_rope:
            raise ValueError("F-Lite: use_rope=False is not supported; no published model has it")
        if hidden_size % num_heads or (hidden_size // num_heads) % 4:
            raise ValueError(
                f"F-Lite: hidden_size {hidden_size} in {num_heads} heads does not give heads whose channels divide by 4"
            )
        self.patch_size = patch_size
        self.in_channels = self.out_channels = in_channels
        self.head_dim = hidden_size // num_heads
        self.rope_base = rope_base
        self.gradient_checkpointing = gradient_checkpoint
        at = {"device": device, "dtype": dtype}
        self.register_tokens = torch.nn.Parameter(torch.zeros(1, REGISTERS, hidden_size, **at))
        self.patch_embed = PatchEmbed(in_channels, hidden_size, patch_size, operations=operations, **at)
        self.time_embed = torch.nn.Sequential(
            operations.Linear(hidden_size, 4 * hidden_size, **at),
            torch.nn.SiLU(),
            operations.Linear(4 * hidden_size, hidden_size, **at),
        )
        self.blocks = torch.nn.ModuleList(
            FLiteBlock(
                hidden_size,
                num_heads,
                cross_attn_input_size,
                mlp_ratio,
                train_bias_and_rms,
                residual_v,
                dynamic_softmax_temperature,
                operations=operations,
                **at,
            )
            for _ in range(depth)
        )
        self.final_modulation = torch.nn.Sequential(
            torch.nn.SiLU(), operations.Linear(hidden_size, 2 * hidden_size, **at)
        )
        self.final_norm = operations.RMSNorm(hidden_size, eps=EPS, elementwise_affine=train_bias_and_rms, **at)
        self.final_proj = operations.Linear(hidden_size, in_channels * patch_size**2, **at)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for name in ROPE_BUFFERS:
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _forward(self, x, timesteps, context, attention_mask=None, transformer_options=None, control=None, **_):
        """x: [B, C, H, W] noisy latent; timesteps: [B] flow time 0..1, float32; context: [B, L, cross_attn_input_size];
        attention_mask: [B, L], nonzero = attend, or None (the published pipeline attends to all padding).

        Returns [B, C, H, W]: data - noise, the reference's sign. Other conditions that a host hands to every model are
        not this model's and are not read.
        """
        height, width = x.shape[-2:]
        x = pad_to_patch_size(x, self.patch_size)
        rows, columns = x.shape[-2] // self.patch_size, x.shape[-1] // self.patch_size
        img = self.patch_embed(x)
        img = torch.cat((self.register_tokens.to(img).expand(img.shape[0], -1, -1), img), dim=1)
        # Scaled before the frequencies come in: the recordings tell the order, by the last digits.
        vec = self.time_embed(sinusoidal_embedding(timesteps.float() * 1000.0, img.shape[-1]).to(img.dtype))
        pe = self._rope(rows, columns, x.device)
        attn_mask = None if attention_mask is None else attention_mask.bool()

        loop = BlockLoop("double", len(self.blocks), transformer_options or {}, control, self)
        first_v = None
        for i, block in enumerate(self.blocks):
            args = {"img": img, "txt": context, "vec": vec, "pe": pe, "first_v": first_v, "attn_mask": attn_mask}
            out = loop.run(i, block, args)
            img, first_v = out["img"], out.get("first_v", first_v)

        shift, scale = self.final_modulation(vec)[:, None].chunk(2, dim=-1)
        out = self.final_proj(modulate(self.final_norm(img[:, REGISTERS:]), shift, scale))
        # Unlike the tokens that go in, those that come out hold the channels fastest.
        out = out.unflatten(-1, (self.patch_size, self.patch_size, -1)).unflatten(1, (rows, columns))
        return out.permute(0, 5, 1, 3, 2, 4).reshape(x.shape)[..., :height, :width]

    def _rope(self, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """[registers + tokens, head_dim // 2, 2]: registers stand still, tokens turn backwards by row and column."""
        axis = self.head_dim // 2
        grid = grid_rope((rows, columns), (axis, axis), self.rope_base, device)
        still = torch.tensor((1.0, 0.0), device=device).expand(REGISTERS, axis, 2)
        return torch.cat((still, grid * torch.tensor((1.0, -1.0), device=device)))
