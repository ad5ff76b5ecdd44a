"""Sana and its descendants: linear attention inside the picture, softmax attention to text.

Depthwise convolutions in the feed-forward tell a token where it is; only checkpoints for large pictures add a table of
positions. Keys and constructor arguments are those of the published layout.
"""
# Sana, SANA-1.5 and SANA-Sprint, by NVIDIA and MIT HAN Lab; large pictures: 2K and 4K; the layout is that of diffusers.
# Facts: the Sana papers (arXiv 2410.10629, 2501.18427, 2503.09641) and diffusers' SanaTransformer2DModel 0.42.1;
# verified stage by stage against the latter.

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..layers.attention import attention
from ..layers.dit import BlockLoop, DiffusionTransformer
from ..layers.embeddings import sinusoidal_embedding
from ..layers.linear_attention import linear_attention
from ..layers.patches import pad_to_patch_size
from ..layers.pointwise import PointwiseLayers
from .position import position_table

# Of the norms on queries, keys and captions. Block norms have `norm_eps`, the last one 1e-6.
QK_EPS = 1e-5
FINAL_EPS = 1e-6
FLOAT16_MAX = 65504.0


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(1 + scale) * x + shift. x: [B, L, D]; shift, scale: [B, 1, D]."""
    return torch.addcmul(shift, x, 1 + scale)


def table_rows(table: torch.Tensor, vec: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A learned table [N, D] moved by the time embedding, row by row: N tensors [B, 1, D].

    vec: [B, N, D], or [B, 1, D] where every row is moved alike.
    """
    return (table.to(device=vec.device, dtype=vec.dtype) + vec).unsqueeze(2).unbind(1)


class PatchEmbed(torch.nn.Module):
    def __init__(
        self, in_channels, dim, patch_size, base_size, interpolation_scale, device=None, dtype=None, operations=torch.nn
    ):
        super().__init__()
        self.base_size = base_size
        self.interpolation_scale = interpolation_scale
        self.proj = operations.Conv2d(
            in_channels, dim, kernel_size=patch_size, stride=patch_size, device=device, dtype=dtype
        )

    def forward(self, x):
        x = self.proj(x)
        # In order once: every sum on the residual stream keeps its strides, and every norm would copy it again.
        tokens = x.flatten(2).transpose(1, 2).contiguous()
        if self.interpolation_scale is None:
            return tokens
        table = position_table(x.shape[-2:], x.shape[1], self.base_size, self.interpolation_scale, x.device)
        return (tokens + table).to(tokens.dtype)


class TwoLayers(torch.nn.Module):
    """Linear, activation, linear, under the names that timestep, guidance and caption embedders share."""

    def __init__(self, in_dim, dim, activation, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.activation = activation
        self.linear_1 = operations.Linear(in_dim, dim, device=device, dtype=dtype)
        self.linear_2 = operations.Linear(dim, dim, device=device, dtype=dtype)

    def forward(self, x):
        return self.linear_2(self.activation(self.linear_1(x)))


class TimeEmbed(torch.nn.Module):
    """Sana and SANA-1.5: the time, as a vector for the last layer and as six for every block."""

    def __init__(self, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.emb = torch.nn.Module()
        self.emb.timestep_embedder = TwoLayers(256, dim, F.silu, operations=operations, **factory)
        self.linear = operations.Linear(dim, 6 * dim, **factory)

    def forward(self, timesteps, guidance, dtype):
        embedding = self.emb.timestep_embedder(sinusoidal_embedding(timesteps, 256).to(dtype))
        return self.linear(F.silu(embedding)), embedding


class TimeGuidanceEmbed(torch.nn.Module):
    """Sprint: time and guidance in one vector, so that no second pass is needed."""

    def __init__(self, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.timestep_embedder = TwoLayers(256, dim, F.silu, operations=operations, **factory)
        self.guidance_embedder = TwoLayers(256, dim, F.silu, operations=operations, **factory)
        self.linear = operations.Linear(dim, 6 * dim, **factory)

    def forward(self, timesteps, guidance, dtype):
        if guidance is None:
            raise ValueError(
                "Sana-Sprint: no guidance was given, and this model embeds it; pass guidance=[B], the guidance scale "
                "times guidance_embeds_scale"
            )
        embedding = self.timestep_embedder(sinusoidal_embedding(timesteps, 256).to(dtype))
        embedding = embedding + self.guidance_embedder(sinusoidal_embedding(guidance, 256).to(dtype))
        return self.linear(F.silu(embedding)), embedding


class SelfAttention(torch.nn.Module):
    def __init__(self, dim, heads, head_dim, bias, qk_norm, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = heads * head_dim
        self.heads = heads
        self.to_q = operations.Linear(dim, inner, bias=bias, **factory)
        self.to_k = operations.Linear(dim, inner, bias=bias, **factory)
        self.to_v = operations.Linear(dim, inner, bias=bias, **factory)
        self.norm_q = operations.RMSNorm(inner, eps=QK_EPS, **factory) if qk_norm else None
        self.norm_k = operations.RMSNorm(inner, eps=QK_EPS, **factory) if qk_norm else None
        self.to_out = torch.nn.ModuleList([operations.Linear(inner, dim, **factory)])

    def forward(self, x):
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        if self.norm_q is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        out = self.to_out[0](linear_attention(q, k, v))
        return out.clamp(-FLOAT16_MAX, FLOAT16_MAX) if out.dtype == torch.float16 else out


class CrossAttention(torch.nn.Module):
    def __init__(self, dim, context_dim, heads, head_dim, qk_norm, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = heads * head_dim
        self.heads = heads
        self.to_q = operations.Linear(dim, inner, **factory)
        self.to_k = operations.Linear(context_dim, inner, **factory)
        self.to_v = operations.Linear(context_dim, inner, **factory)
        self.norm_q = operations.RMSNorm(inner, eps=QK_EPS, **factory) if qk_norm else None
        self.norm_k = operations.RMSNorm(inner, eps=QK_EPS, **factory) if qk_norm else None
        self.to_out = torch.nn.ModuleList([operations.Linear(inner, dim, **factory)])

    def forward(self, x, context, mask=None, transformer_options=None):
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        if self.norm_q is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return self.to_out[0](attention(q, k, v, mask=mask, transformer_options=transformer_options))


class GLUMBConv(PointwiseLayers):
    """The feed-forward: 1x1 convolution, depthwise 3x3, gate, 1x1 convolution."""

    pointwise = ("conv_inverted", "conv_point")

    def __init__(self, dim, expand_ratio, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        hidden = int(expand_ratio * dim)
        self.conv_inverted = operations.Linear(dim, 2 * hidden, **factory)
        self.conv_depth = operations.Conv2d(2 * hidden, 2 * hidden, 3, padding=1, groups=2 * hidden, **factory)
        self.conv_point = operations.Linear(hidden, dim, bias=False, **factory)

    def forward(self, x, size):
        """x: [B, rows * columns, D]; size: (rows, columns)."""
        # In place: these are the widest tensors of the model, and a fresh one costs as much as the arithmetic.
        x = F.silu(self.conv_inverted(x.unflatten(1, size)), inplace=True).movedim(-1, 1)
        x, gate = self.conv_depth(x).movedim(1, -1).flatten(1, 2).chunk(2, dim=-1)
        # Some backends give the picture back channels first, and a matrix product of such tokens is ten times slower.
        return self.conv_point(F.silu(gate).mul_(x).contiguous())


class SanaTransformerBlock(torch.nn.Module):
    def __init__(
        self,
        dim,
        num_attention_heads,
        attention_head_dim,
        num_cross_attention_heads,
        cross_attention_head_dim,
        cross_attention_dim,
        mlp_ratio,
        attention_bias,
        norm_elementwise_affine,
        norm_eps,
        qk_norm,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.norm1 = operations.LayerNorm(dim, elementwise_affine=False, eps=norm_eps, **factory)
        self.attn1 = SelfAttention(
            dim, num_attention_heads, attention_head_dim, attention_bias, qk_norm, operations=operations, **factory
        )
        self.norm2 = operations.LayerNorm(dim, elementwise_affine=norm_elementwise_affine, eps=norm_eps, **factory)
        self.attn2 = CrossAttention(
            dim,
            cross_attention_dim,
            num_cross_attention_heads,
            cross_attention_head_dim,
            qk_norm,
            operations=operations,
            **factory,
        )
        self.ff = GLUMBConv(dim, mlp_ratio, operations=operations, **factory)
        self.scale_shift_table = torch.nn.Parameter(torch.empty(6, dim, **factory))

    def forward(self, img, txt, vec, size, attn_mask=None, transformer_options=None):
        """The image tokens, changed; the text stays as it is."""
        # img [B, rows * columns, D]; txt [B, L, D]; vec [B, 6, D]; size (rows, columns); attn_mask [B, L].
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = table_rows(self.scale_shift_table, vec)
        img = torch.addcmul(img, gate_attn, self.attn1(modulate(self.norm1(img), shift_attn, scale_attn)))
        # The text is read from the residual stream as it is: the block's second norm belongs to the feed-forward.
        img = img + self.attn2(img, txt, attn_mask, transformer_options)
        x = self.ff(modulate(self.norm2(img), shift_mlp, scale_mlp), size)
        return {"img": torch.addcmul(img, gate_mlp, x)}


class SanaTransformer2DModel(DiffusionTransformer):
    """One module for all of them, which differ by options.

    The scales of time and guidance are kept for the host, which multiplies with them before the call, as the pipelines
    of the reference do.
    """

    repeated_blocks = ("SanaTransformerBlock",)

    def __init__(
        self,
        in_channels=32,
        out_channels=32,
        num_attention_heads=70,
        attention_head_dim=32,
        num_layers=20,
        num_cross_attention_heads=20,
        cross_attention_head_dim=112,
        cross_attention_dim=2240,
        caption_channels=2304,
        mlp_ratio=2.5,
        attention_bias=False,
        sample_size=32,  # read for the position table alone
        patch_size=1,
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        interpolation_scale=None,  # of 2K and 4K checkpoints
        guidance_embeds=False,  # of Sprint
        guidance_embeds_scale=0.1,
        qk_norm=None,  # of SANA-1.5 and Sprint
        timestep_scale=1.0,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__(dtype)
        dim = num_attention_heads * attention_head_dim
        if cross_attention_dim != dim:
            raise ValueError(
                f"Sana: cross_attention_dim {cross_attention_dim} is not {num_attention_heads} heads x "
                f"{attention_head_dim} = {dim}, the width captions are projected to"
            )
        if qk_norm not in (None, "rms_norm_across_heads"):
            raise ValueError(f"Sana: qk_norm {qk_norm!r} is unknown; known are None and 'rms_norm_across_heads'")
        if interpolation_scale is not None and dim % 4:
            raise ValueError(f"Sana: a position table needs a width that 4 divides, and {dim} is none")
        self.patch_size = patch_size
        self.in_channels, self.out_channels = in_channels, out_channels or in_channels
        self.context_width = caption_channels
        self.guidance_embeds_scale = guidance_embeds_scale
        self.timestep_scale = timestep_scale
        factory = {"device": device, "dtype": dtype, "operations": operations}
        parameter = {"device": device, "dtype": dtype}
        self.patch_embed = PatchEmbed(
            in_channels, dim, patch_size, sample_size // patch_size, interpolation_scale, **factory
        )
        self.time_embed = TimeGuidanceEmbed(dim, **factory) if guidance_embeds else TimeEmbed(dim, **factory)
        self.caption_projection = TwoLayers(caption_channels, dim, torch.nn.GELU(approximate="tanh"), **factory)
        self.caption_norm = operations.RMSNorm(dim, eps=QK_EPS, **parameter)
        self.transformer_blocks = torch.nn.ModuleList(
            SanaTransformerBlock(
                dim,
                num_attention_heads,
                attention_head_dim,
                num_cross_attention_heads,
                cross_attention_head_dim,
                cross_attention_dim,
                mlp_ratio,
                attention_bias,
                norm_elementwise_affine,
                norm_eps,
                qk_norm is not None,
                **factory,
            )
            for _ in range(num_layers)
        )
        self.scale_shift_table = torch.nn.Parameter(torch.empty(2, dim, **parameter))
        self.norm_out = operations.LayerNorm(dim, elementwise_affine=False, eps=FINAL_EPS, **parameter)
        self.proj_out = operations.Linear(dim, patch_size**2 * self.out_channels, **parameter)

    def _forward(
        self,
        x,  # [B, C, H, W], the noisy latent
        timesteps,  # [B], float32: 0..1000 (Sana, SANA-1.5) or the flow time 0..1 (Sprint)
        context,  # [B, L, caption_channels]
        attention_mask=None,  # [B, L], nonzero = a real token, or None
        transformer_options=None,
        control=None,
        guidance=None,  # [B], Sprint only: guidance scale times `guidance_embeds_scale`
        **_,
    ):
        """The velocity, which is noise minus data, in the shape of the latent. Raises ValueError when a distilled model
        gets no guidance.

        Other conditions that a host hands to every model are not this model's and are not read.
        """
        height, width = x.shape[-2:]
        x = pad_to_patch_size(x, self.patch_size)
        size = (x.shape[-2] // self.patch_size, x.shape[-1] // self.patch_size)
        img = self.patch_embed(x)
        txt = self.caption_norm(self.caption_projection(context))
        modulation, embedding = self.time_embed(timesteps, guidance, img.dtype)
        vec = modulation.unflatten(-1, (6, -1))

        loop = BlockLoop("double", len(self.transformer_blocks), transformer_options or {}, control, self)
        args = {"txt": txt, "vec": vec, "size": size, "attn_mask": attention_mask}
        for i, block in enumerate(self.transformer_blocks):
            img = loop.run(i, block, {"img": img, **args})["img"]

        shift, scale = table_rows(self.scale_shift_table, embedding[:, None])
        out = self.proj_out(modulate(self.norm_out(img), shift, scale))
        return self.unpatchify(out, size)[..., :height, :width]

    def unpatchify(self, tokens: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """[B, rows * columns, p * p * C] -> [B, C, H, W]; channels are the fastest inside a token."""
        grid = tokens.unflatten(1, size).unflatten(-1, (self.patch_size, self.patch_size, -1))
        return grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
