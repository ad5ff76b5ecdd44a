"""CogView4: text and image tokens in one attention, with one set of weights for both, modulated apart.

Keys and constructor arguments are those of the published layout.
"""
# By Z.ai / THUDM; the layout is that of diffusers.
# Facts: diffusers' CogView4Transformer2DModel 0.42.1; verified stage by stage against it.

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..layers.attention import attention
from ..layers.dit import BlockLoop, DiffusionTransformer
from ..layers.embeddings import axis_frequencies, rotate_halves, sinusoidal_embedding
from ..layers.patches import pad_to_patch_size, patchify, unpatchify

EPS = 1e-5
THETA = 10000.0
# Pixels per latent pixel, each way: sizes are conditions of this model, and it is told them in pixels.
COMPRESSION = 8


def norm(x: torch.Tensor) -> torch.Tensor:
    """LayerNorm without weights."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def modulated_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x: [B, L, D]; shift, scale: [B, 1, D]."""
    return torch.addcmul(shift, norm(x), 1 + scale)


def stretched_grid_rope(
    rows: int, columns: int, head_dim: int, axes: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Rotary angles of a grid whose positions are stretched to ``axes`` steps and rounded down to whole ones.

    Row r sits at floor(r * axes[0] / rows), so a picture of any size spans the same positions. Returns float32
    [rows * columns, head_dim // 2, 2], cosine and sine: the first half of the pairs turn with the row.
    """
    dim = head_dim // 2
    frequencies = torch.tensor(axis_frequencies(dim, THETA), dtype=torch.float32, device=device)
    row = torch.arange(rows, device=device) * axes[0] // rows
    column = torch.arange(columns, device=device) * axes[1] // columns
    row, column = (row[:, None, None] * frequencies, column[None, :, None] * frequencies)
    angle = torch.cat((row.expand(-1, columns, -1), column.expand(rows, -1, -1)), dim=-1).flatten(0, 1)
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


class PatchEmbed(torch.nn.Module):
    def __init__(self, patch_dim, dim, text_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.proj = operations.Linear(patch_dim, dim, device=device, dtype=dtype)
        self.text_proj = operations.Linear(text_dim, dim, device=device, dtype=dtype)

    def forward(self, img, txt):
        return self.proj(img), self.text_proj(txt)


class MLPEmbedder(torch.nn.Module):
    def __init__(self, in_dim, out_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.linear_1 = operations.Linear(in_dim, out_dim, device=device, dtype=dtype)
        self.linear_2 = operations.Linear(out_dim, out_dim, device=device, dtype=dtype)

    def forward(self, x):
        return self.linear_2(F.silu(self.linear_1(x)))


class TimeConditionEmbed(torch.nn.Module):
    """The timestep and three sizes in pixels, as one vector."""

    def __init__(self, time_dim, condition_dim, embed_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype, "operations": operations}
        self.time_dim = time_dim
        self.condition_dim = condition_dim
        self.timestep_embedder = MLPEmbedder(time_dim, embed_dim, **factory)
        self.condition_embedder = MLPEmbedder(6 * condition_dim, embed_dim, **factory)

    def forward(self, timesteps, sizes, dtype):
        """timesteps: [B]; sizes: [B or 1, 6], original height and width, crop top and left, target height and width.
        Returns [B, embed_dim] of ``dtype``, before the activation that every user of it wants."""
        time = sinusoidal_embedding(timesteps, self.time_dim)
        condition = sinusoidal_embedding(sizes.flatten(), self.condition_dim).view(sizes.shape[0], -1)
        return self.timestep_embedder(time.to(dtype)) + self.condition_embedder(condition.to(dtype))


class Modulation(torch.nn.Module):
    """Twelve vectors, image and text by turns: shift, scale, gate of the attention, then of the feed-forward."""

    def __init__(self, embed_dim, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.linear = operations.Linear(embed_dim, 12 * dim, device=device, dtype=dtype)

    def forward(self, vec):
        return self.linear(vec)[:, None].chunk(12, dim=-1)


class CogView4Attention(torch.nn.Module):
    """Text before image, same weights; heads normalised without weights. Where a text token stands, the rotary table
    holds a turn by nothing."""

    def __init__(self, dim, heads, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.heads = heads
        self.to_q = operations.Linear(dim, dim, **factory)
        self.to_k = operations.Linear(dim, dim, **factory)
        self.to_v = operations.Linear(dim, dim, **factory)
        self.to_out = torch.nn.ModuleList([operations.Linear(dim, dim, **factory)])

    def forward(self, x, pe, attn_mask=None, transformer_options=None):
        q, k, v = (project(x).unflatten(-1, (self.heads, -1)) for project in (self.to_q, self.to_k, self.to_v))
        q, k = rotate_halves(norm(q), pe), rotate_halves(norm(k), pe)
        out = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            mask=attn_mask,
            transformer_options=transformer_options,
        )
        return self.to_out[0](out)


class GELUProjection(torch.nn.Module):
    def __init__(self, dim, inner_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.proj = operations.Linear(dim, inner_dim, device=device, dtype=dtype)

    def forward(self, x):
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(torch.nn.Module):
    def __init__(self, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.net = torch.nn.Sequential(
            GELUProjection(dim, 4 * dim, device=device, dtype=dtype, operations=operations),
            torch.nn.Identity(),  # published keys count a dropout here
            operations.Linear(4 * dim, dim, device=device, dtype=dtype),
        )

    def forward(self, x):
        return self.net(x)


class CogView4TransformerBlock(torch.nn.Module):
    def __init__(self, dim, heads, embed_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype, "operations": operations}
        self.norm1 = Modulation(embed_dim, dim, **factory)
        self.attn1 = CogView4Attention(dim, heads, **factory)
        self.ff = FeedForward(dim, **factory)

    def forward(self, img, txt, vec, pe, attn_mask=None, transformer_options=None):
        (
            shift_attn,
            txt_shift_attn,
            scale_attn,
            txt_scale_attn,
            gate_attn,
            txt_gate_attn,
            shift_mlp,
            txt_shift_mlp,
            scale_mlp,
            txt_scale_mlp,
            gate_mlp,
            txt_gate_mlp,
        ) = self.norm1(vec)
        # The two streams go through every weight together: one multiplication, and one unpacking of quantized weights.
        split = (txt.shape[1], img.shape[1])
        x = torch.cat(
            (modulated_norm(txt, txt_shift_attn, txt_scale_attn), modulated_norm(img, shift_attn, scale_attn)), dim=1
        )
        txt_x, img_x = self.attn1(x, pe, attn_mask, transformer_options).split(split, dim=1)
        img = torch.addcmul(img, gate_attn, img_x)
        txt = torch.addcmul(txt, txt_gate_attn, txt_x)
        x = torch.cat(
            (modulated_norm(txt, txt_shift_mlp, txt_scale_mlp), modulated_norm(img, shift_mlp, scale_mlp)), dim=1
        )
        txt_x, img_x = self.ff(x).split(split, dim=1)
        return {"img": torch.addcmul(img, gate_mlp, img_x), "txt": torch.addcmul(txt, txt_gate_mlp, txt_x)}


class FinalNorm(torch.nn.Module):
    def __init__(self, embed_dim, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.linear = operations.Linear(embed_dim, 2 * dim, device=device, dtype=dtype)

    def forward(self, img, vec):
        scale, shift = self.linear(vec)[:, None].chunk(2, dim=-1)
        return modulated_norm(img, shift, scale)


class CogView4Transformer2DModel(DiffusionTransformer):
    """The transformer. Half precision overflows in the published weights; bfloat16 and float32 do not."""

    repeated_blocks = ("CogView4TransformerBlock",)

    def __init__(
        self,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=28,
        attention_head_dim=128,
        num_attention_heads=32,
        text_embed_dim=4096,
        time_embed_dim=512,
        condition_dim=256,
        # The published configuration's largest and usual latent sides, in patches and in latent pixels; nothing is
        # computed from them, hosts may read them.
        pos_embed_max_size=128,
        sample_size=128,
        rope_axes_dim=(256, 256),
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__(dtype)
        if attention_head_dim % 4:
            raise ValueError(
                f"CogView4: heads of {attention_head_dim} channels can't be turned by row and column; "
                "attention_head_dim must be a multiple of 4"
            )
        dim = num_attention_heads * attention_head_dim
        self.patch_size = patch_size
        self.in_channels, self.out_channels = in_channels, out_channels
        self.head_dim = attention_head_dim
        self.rope_axes_dim = tuple(rope_axes_dim)
        self.pos_embed_max_size = pos_embed_max_size
        self.sample_size = sample_size
        factory = {"device": device, "dtype": dtype, "operations": operations}
        self.patch_embed = PatchEmbed(in_channels * patch_size**2, dim, text_embed_dim, **factory)
        self.time_condition_embed = TimeConditionEmbed(dim, condition_dim, time_embed_dim, **factory)
        self.transformer_blocks = torch.nn.ModuleList(
            CogView4TransformerBlock(dim, num_attention_heads, time_embed_dim, **factory) for _ in range(num_layers)
        )
        self.norm_out = FinalNorm(time_embed_dim, dim, **factory)
        self.proj_out = operations.Linear(dim, self.out_channels * patch_size**2, device=device, dtype=dtype)

    def _forward(
        self,
        x,  # [B, in_channels, H, W], the noisy latent
        timesteps,  # [B], 0..1000, of the schedule before its shift, see sampling.py
        context,  # [B, L, text_embed_dim]
        attention_mask=None,  # [B, L], nonzero = a real token, or None: the published pipeline pads and masks nothing
        transformer_options=None,
        control=None,
        original_size=None,  # [B, 2], height and width in pixels; None = this latent's
        target_size=None,  # the same
        crop_coords=None,  # [B, 2], top and left in pixels; None = (0, 0)
        **_,
    ):
        """The velocity, which is noise minus data, in the shape of the latent but with the output's channels.

        Other conditions that a host hands to every model are not this model's and are not read.
        """
        if x.shape[1] != self.in_channels:
            raise ValueError(
                f"CogView4: this model takes {self.in_channels} latent channels and was given {x.shape[1]}. With twice "
                "as many as its latents have it is the control variant (CogView4-Control), which is fed a control "
                "picture beside them and is not supported; use CogView4-6B"
            )
        height, width = x.shape[-2:]
        sizes = self._sizes(x, original_size, crop_coords, target_size)
        x = pad_to_patch_size(x, self.patch_size)
        rows, columns = x.shape[-2] // self.patch_size, x.shape[-1] // self.patch_size
        img, txt = self.patch_embed(patchify(x, self.patch_size), context)
        vec = F.silu(self.time_condition_embed(timesteps, sizes, img.dtype))
        pe = stretched_grid_rope(rows, columns, self.head_dim, self.rope_axes_dim, x.device)
        still = torch.tensor((1.0, 0.0), device=pe.device).expand(txt.shape[1], pe.shape[1], 2)
        pe = torch.cat((still, pe))
        attn_mask = None
        if attention_mask is not None:
            attn_mask = F.pad(attention_mask.bool(), (0, img.shape[1]), value=True)

        loop = BlockLoop("double", len(self.transformer_blocks), transformer_options or {}, control, self)
        for i, block in enumerate(self.transformer_blocks):
            out = loop.run(i, block, {"img": img, "txt": txt, "vec": vec, "pe": pe, "attn_mask": attn_mask})
            img, txt = out["img"], out["txt"]

        out = self.proj_out(self.norm_out(img, vec))
        return unpatchify(out, self.patch_size, x.shape[-2], x.shape[-1])[..., :height, :width]

    @staticmethod
    def _sizes(x, original_size, crop_coords, target_size) -> torch.Tensor:
        """[B or 1, 6] float32."""
        own = (x.shape[-2] * COMPRESSION, x.shape[-1] * COMPRESSION)
        given = ((original_size, own), (crop_coords, (0, 0)), (target_size, own))
        parts = [
            torch.tensor([default], dtype=torch.float32, device=x.device)
            if value is None
            else value.to(x.device, torch.float32).reshape(-1, 2)
            for value, default in given
        ]
        batch = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(batch, 2) for part in parts], dim=-1)
