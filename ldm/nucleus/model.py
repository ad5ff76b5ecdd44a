"""Nucleus-Image: image tokens attend to themselves and to text that is never updated; its experts are sparse.

Keys and constructor arguments are those of the published layout, except that banks of experts are layers.
"""
# By Nucleus AI; the layout is that of diffusers; for the banks see experts.py.
# Facts: diffusers' NucleusMoEImageTransformer2DModel 0.42.1; verified stage by stage against it.

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..layers.attention import attention
from ..layers.dit import BlockLoop, DiffusionTransformer
from ..layers.embeddings import grid_rope, rotate_pairs, sinusoidal_embedding
from ..layers.patches import pad_to_patch_size, patchify, unpatchify
from .experts import FeedForward, MoELayer

EPS = 1e-6
THETA = 10000.0
TIME_FACTOR = 1000.0
GATE_LIMIT = 2.0
# The width of the dense feed-forward is a multiple of it.
MLP_MULTIPLE = 128


def norm(x: torch.Tensor) -> torch.Tensor:
    """LayerNorm without weights."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def moe_layers(strategy: str, num_layers: int) -> tuple[bool, ...]:
    """Which blocks have experts. Raises ValueError on an unknown strategy."""
    first_and_last = {
        "leave_first_three_and_last_block_dense": (3, num_layers - 1),
        "leave_first_three_blocks_dense": (3, num_layers),
        "leave_first_block_dense": (1, num_layers),
        "all_moe": (0, num_layers),
        "all_dense": (num_layers, num_layers),
    }
    if strategy not in first_and_last:
        raise ValueError(
            f"Nucleus-Image: dense_moe_strategy {strategy!r} is unknown; known are {', '.join(first_and_last)}"
        )
    first, last = first_and_last[strategy]
    return tuple(first <= i < last for i in range(num_layers))


def joint_rope(
    rows: int, columns: int, text_length: int, axes_dim: tuple[int, int, int], device: torch.device
) -> torch.Tensor:
    """Rotary angles of a picture's tokens, then of a text's, in float32.

    Pictures are centred; an odd one reaches one further up and left than down and right. Text tokens stand on the
    diagonal behind the picture's longer half; padding counts.
    """
    # [rows * columns + text_length, D / 2, 2]. 5 rows are -3 .. 1; in Qwen-Image's tables, otherwise the same, -2 .. 2.
    image = grid_rope(
        (1, rows, columns), axes_dim, THETA, device, offsets=(0, rows // 2 - rows, columns // 2 - columns)
    )
    start = float(max(rows // 2, columns // 2))
    text = [grid_rope((text_length,), (dim,), THETA, device, offsets=(start,)) for dim in axes_dim]
    return torch.cat((image, torch.cat(text, dim=1)))


class MLPEmbedder(torch.nn.Module):
    def __init__(self, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.linear_1 = operations.Linear(dim, 4 * dim, device=device, dtype=dtype)
        self.linear_2 = operations.Linear(4 * dim, dim, device=device, dtype=dtype)

    def forward(self, x):
        return self.linear_2(F.silu(self.linear_1(x)))


class TimeEmbed(torch.nn.Module):
    def __init__(self, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.dim = dim
        self.timestep_embedder = MLPEmbedder(dim, device=device, dtype=dtype, operations=operations)
        self.norm = operations.RMSNorm(dim, eps=EPS, device=device, dtype=dtype)

    def forward(self, timesteps, dtype):
        """timesteps: [B], 0..1. Returns [B, dim] of ``dtype``."""
        waves = sinusoidal_embedding(timesteps, self.dim, scale=TIME_FACTOR)
        return self.norm(self.timestep_embedder(waves.to(dtype)))


class NucleusAttention(torch.nn.Module):
    """Queries from the image, keys and values from image and text; each key serves several query heads."""

    def __init__(self, dim, heads, kv_heads, head_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        at = {"device": device, "dtype": dtype}
        self.heads = heads
        self.kv_heads = kv_heads
        inner, kv_inner = heads * head_dim, kv_heads * head_dim
        self.norm_q = operations.RMSNorm(head_dim, eps=EPS, **at)
        self.norm_k = operations.RMSNorm(head_dim, eps=EPS, **at)
        self.to_q = operations.Linear(dim, inner, bias=False, **at)
        self.to_k = operations.Linear(dim, kv_inner, bias=False, **at)
        self.to_v = operations.Linear(dim, kv_inner, bias=False, **at)
        self.add_k_proj = operations.Linear(dim, kv_inner, bias=False, **at)
        self.add_v_proj = operations.Linear(dim, kv_inner, bias=False, **at)
        self.norm_added_q = operations.RMSNorm(head_dim, eps=EPS, **at)  # published, never used: text asks nothing
        self.norm_added_k = operations.RMSNorm(head_dim, eps=EPS, **at)
        self.to_out = torch.nn.ModuleList([operations.Linear(inner, dim, bias=False, **at)])

    def forward(self, img, txt, pe, attn_mask=None, transformer_options=None):
        """pe: image tokens first, as in keys and values."""
        kv_heads = (self.kv_heads, -1)
        q = self.norm_q(self.to_q(img).unflatten(-1, (self.heads, -1)))
        k = self.norm_k(self.to_k(img).unflatten(-1, kv_heads))
        txt_k = self.norm_added_k(self.add_k_proj(txt).unflatten(-1, kv_heads))
        q = rotate_pairs(q, pe[: img.shape[1]])
        k = rotate_pairs(torch.cat((k, txt_k), dim=1), pe)
        v = torch.cat((self.to_v(img), self.add_v_proj(txt)), dim=1).unflatten(-1, kv_heads)
        if self.kv_heads != self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=2) for t in (k, v))
        out = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            mask=attn_mask,
            transformer_options=transformer_options,
        )
        return self.to_out[0](out)


class NucleusMoEImageTransformerBlock(torch.nn.Module):
    def __init__(self, dim, text_dim, attention, img_mlp, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        at = {"device": device, "dtype": dtype}
        self.img_mod = torch.nn.Sequential(torch.nn.SiLU(), operations.Linear(dim, 4 * dim, **at))
        self.encoder_proj = operations.Linear(text_dim, dim, **at)
        self.attn = attention
        self.img_mlp = img_mlp

    def forward(self, img, txt, vec, pe, attn_mask=None, transformer_options=None):
        scale_attn, gate_attn, scale_mlp, gate_mlp = self.img_mod(vec)[:, None].chunk(4, dim=-1)
        x = norm(img) * (1 + scale_attn)
        x = self.attn(x, self.encoder_proj(txt), pe, attn_mask, transformer_options)
        img = torch.addcmul(img, gate_attn.clamp(-GATE_LIMIT, GATE_LIMIT).tanh(), x)
        normed = norm(img)
        x = normed * (1 + scale_mlp)
        x = self.img_mlp(x, normed, vec) if isinstance(self.img_mlp, MoELayer) else self.img_mlp(x)
        img = torch.addcmul(img, gate_mlp.clamp(-GATE_LIMIT, GATE_LIMIT).tanh(), x)
        if img.dtype == torch.float16:  # its few huge channels may pass what float16 holds
            limits = torch.finfo(torch.float16)
            img = img.clamp(limits.min, limits.max)
        return {"img": img}


class FinalNorm(torch.nn.Module):
    def __init__(self, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.linear = operations.Linear(dim, 2 * dim, device=device, dtype=dtype)

    def forward(self, img, vec):
        scale, shift = self.linear(F.silu(vec))[:, None].chunk(2, dim=-1)
        return torch.addcmul(shift, norm(img), 1 + scale)


class NucleusMoEImageTransformer2DModel(DiffusionTransformer):
    """``in_channels`` counts a token's numbers (latent channels times patch_size squared), ``out_channels`` a latent's.

    ``capacity_factors``: one for all blocks or one per block; what a block without experts has is not read.
    """

    repeated_blocks = ("NucleusMoEImageTransformerBlock",)

    def __init__(
        self,
        patch_size=2,
        in_channels=64,
        out_channels=None,
        num_layers=24,
        attention_head_dim=128,
        num_attention_heads=16,
        num_key_value_heads=None,
        joint_attention_dim=3584,
        axes_dims_rope=(16, 56, 56),
        mlp_ratio=4.0,
        moe_enabled=True,
        dense_moe_strategy="leave_first_three_and_last_block_dense",
        num_experts=128,
        moe_intermediate_dim=1344,
        capacity_factors=8.0,
        use_sigmoid=False,
        route_scale=2.5,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__(dtype)
        dim = num_attention_heads * attention_head_dim
        kv_heads = num_key_value_heads or num_attention_heads
        if isinstance(capacity_factors, (int, float)):
            capacity_factors = [capacity_factors] * num_layers
        if sum(axes_dims_rope) != attention_head_dim or num_attention_heads % kv_heads:
            raise ValueError(
                f"Nucleus-Image: {num_attention_heads} heads of {attention_head_dim} channels fit neither "
                f"axes_dims_rope {tuple(axes_dims_rope)} nor {kv_heads} key and value heads"
            )
        if len(capacity_factors) != num_layers:
            raise ValueError(f"Nucleus-Image: {len(capacity_factors)} capacity_factors for {num_layers} blocks")
        self.patch_size = patch_size
        self.in_channels, self.out_channels = in_channels // patch_size**2, out_channels or in_channels
        self.context_width = joint_attention_dim
        self.axes_dims_rope = tuple(axes_dims_rope)
        self.num_key_value_heads = kv_heads
        self.capacity_factors = tuple(capacity_factors)
        factory = {"device": device, "dtype": dtype, "operations": operations}

        def mlp(i: int) -> torch.nn.Module:
            if not (moe_enabled and with_experts[i]):
                return FeedForward(dim, int(dim * mlp_ratio * 2 / 3) // MLP_MULTIPLE * MLP_MULTIPLE, **factory)
            return MoELayer(
                dim, moe_intermediate_dim, num_experts, capacity_factors[i], use_sigmoid, route_scale, **factory
            )

        with_experts = moe_layers(dense_moe_strategy, num_layers)
        self.time_text_embed = TimeEmbed(dim, **factory)
        self.txt_norm = operations.RMSNorm(joint_attention_dim, eps=EPS, device=device, dtype=dtype)
        self.img_in = operations.Linear(in_channels, dim, device=device, dtype=dtype)
        self.transformer_blocks = torch.nn.ModuleList(
            NucleusMoEImageTransformerBlock(
                dim,
                joint_attention_dim,
                NucleusAttention(dim, num_attention_heads, kv_heads, attention_head_dim, **factory),
                mlp(i),
                **factory,
            )
            for i in range(num_layers)
        )
        self.norm_out = FinalNorm(dim, **factory)
        self.proj_out = operations.Linear(
            dim, patch_size**2 * self.out_channels, bias=False, device=device, dtype=dtype
        )

    def _forward(self, x, timesteps, context, attention_mask=None, transformer_options=None, control=None, **_):
        """x: [B, C, H, W] noisy latent, or [B, C, 1, H, W] as Wan's autoencoder counts it; timesteps: [B], 0..1;
        context: [B, L, joint_attention_dim], not yet normed; attention_mask: [B, L], nonzero = a real token, or None.

        Returns x's shape: data - noise, the reference's sign. Other conditions that a host hands to every model are not
        this model's and are not read. Raises ValueError on several frames.
        """
        shape, batch = x.shape, x.shape[0]
        if x.ndim == 5:
            if shape[2] != 1:
                raise ValueError(f"Nucleus-Image makes pictures; this latent has {shape[2]} frames: {list(shape)}")
            x = x[:, :, 0]
        x = pad_to_patch_size(x, self.patch_size)
        height, width = x.shape[-2:]
        img = self.img_in(patchify(x, self.patch_size))
        txt = self.txt_norm(context)
        vec = self.time_text_embed(timesteps, img.dtype)
        rows, columns = height // self.patch_size, width // self.patch_size
        pe = joint_rope(rows, columns, txt.shape[1], self.axes_dims_rope, x.device)
        attn_mask = None
        if attention_mask is not None:
            attn_mask = F.pad(attention_mask.bool(), (img.shape[1], 0), value=True)

        loop = BlockLoop("double", len(self.transformer_blocks), transformer_options or {}, control, self)
        for i, block in enumerate(self.transformer_blocks):
            img = loop.run(i, block, {"img": img, "txt": txt, "vec": vec, "pe": pe, "attn_mask": attn_mask})["img"]

        out = unpatchify(self.proj_out(self.norm_out(img, vec)), self.patch_size, height, width)
        return out[..., : shape[-2], : shape[-1]].reshape(batch, -1, *shape[2:])
