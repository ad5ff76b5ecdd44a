"""PRX: image tokens attend to themselves and to text that is projected once and never updated.

Keys and constructor arguments are those of the published layout.
"""
# By Photoroom, PRXPixel too; the layout is that of diffusers. Facts: the Photoroom/PRX trainer and diffusers'
# PRXTransformer2DModel 0.42.1; verified stage by stage against the latter.

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..layers.attention import attention
from ..layers.dit import BlockLoop, DiffusionTransformer
from ..layers.embeddings import grid_rope, rotate_pairs, sinusoidal_embedding
from ..layers.patches import pad_to_patch_size, patchify, unpatchify

EPS = 1e-6


def modulated_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A layer norm without weights, then scaled by one more than the scale, and shifted."""
    # x [B, L, D]; shift, scale [B, 1, D].
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPS), 1 + scale)


class MLPEmbedder(torch.nn.Module):
    def __init__(self, in_dim, hidden_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.in_layer = operations.Linear(in_dim, hidden_dim, device=device, dtype=dtype)
        self.out_layer = operations.Linear(hidden_dim, hidden_dim, device=device, dtype=dtype)

    def forward(self, x):
        return self.out_layer(F.silu(self.in_layer(x)))


class ResolutionEmbedder(torch.nn.Module):
    """Height and width in pixels of the network's input, as a vector beside the timestep's."""

    def __init__(self, hidden_size, max_period, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.max_period = max_period
        self.mlp = MLPEmbedder(256, hidden_size, device=device, dtype=dtype, operations=operations)

    def forward(self, height: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """like: [B, D], for batch, device and dtype. Returns [B, D]."""
        size = torch.tensor((height, width), dtype=torch.float32, device=like.device)
        embedding = sinusoidal_embedding(size, 128, max_period=self.max_period).reshape(1, 256)
        return self.mlp(embedding.to(like.dtype)).expand_as(like)


class PRXAttention(torch.nn.Module):
    """Queries from the image; keys and values from text and image. Only image queries and keys are rotated."""

    def __init__(self, dim, heads, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.heads = heads
        factory = {"device": device, "dtype": dtype}
        self.img_qkv_proj = operations.Linear(dim, 3 * dim, bias=False, **factory)
        self.txt_kv_proj = operations.Linear(dim, 2 * dim, bias=False, **factory)
        self.norm_q = operations.RMSNorm(dim // heads, eps=EPS, **factory)
        self.norm_k = operations.RMSNorm(dim // heads, eps=EPS, **factory)
        self.norm_added_k = operations.RMSNorm(dim // heads, eps=EPS, **factory)
        self.to_out = torch.nn.ModuleList([operations.Linear(dim, dim, bias=False, **factory)])

    def forward(self, img, txt, pe, attn_mask=None, transformer_options=None):
        q, k, v = self.img_qkv_proj(img).unflatten(-1, (3, self.heads, -1)).unbind(2)
        txt_k, txt_v = self.txt_kv_proj(txt).unflatten(-1, (2, self.heads, -1)).unbind(2)
        q = rotate_pairs(self.norm_q(q), pe)
        k = rotate_pairs(self.norm_k(k), pe)
        k = torch.cat((self.norm_added_k(txt_k), k), dim=1)
        v = torch.cat((txt_v, v), dim=1)
        out = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            mask=attn_mask,
            transformer_options=transformer_options,
        )
        return self.to_out[0](out)


class Modulation(torch.nn.Module):
    def __init__(self, dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.lin = operations.Linear(dim, 6 * dim, device=device, dtype=dtype)

    def forward(self, vec):
        return self.lin(F.silu(vec))[:, None].chunk(6, dim=-1)


class PRXBlock(torch.nn.Module):
    def __init__(self, hidden_size, num_heads, mlp_ratio, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        mlp_size = int(hidden_size * mlp_ratio)
        self.attention = PRXAttention(hidden_size, num_heads, operations=operations, **factory)
        self.gate_proj = operations.Linear(hidden_size, mlp_size, bias=False, **factory)
        self.up_proj = operations.Linear(hidden_size, mlp_size, bias=False, **factory)
        self.down_proj = operations.Linear(mlp_size, hidden_size, bias=False, **factory)
        self.modulation = Modulation(hidden_size, operations=operations, **factory)

    def forward(self, img, txt, vec, pe, attn_mask=None, transformer_options=None):
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = self.modulation(vec)
        x = self.attention(modulated_norm(img, shift_attn, scale_attn), txt, pe, attn_mask, transformer_options)
        img = torch.addcmul(img, gate_attn, x)
        x = modulated_norm(img, shift_mlp, scale_mlp)
        x = self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return {"img": torch.addcmul(img, gate_mlp, x)}


class FinalLayer(torch.nn.Module):
    def __init__(self, hidden_size, out_features, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.linear = operations.Linear(hidden_size, out_features, device=device, dtype=dtype)
        self.adaLN_modulation = torch.nn.Sequential(
            torch.nn.SiLU(), operations.Linear(hidden_size, 2 * hidden_size, device=device, dtype=dtype)
        )

    def forward(self, img, vec):
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        return self.linear(modulated_norm(img, shift, scale))


class PRXTransformer2DModel(DiffusionTransformer):
    """One module for both kinds: latent PRX, and PRXPixel (``bottleneck_size`` and ``resolution_embeds`` set)."""

    repeated_blocks = ("PRXBlock",)

    def __init__(
        self,
        in_channels=16,
        patch_size=2,
        context_in_dim=2304,
        hidden_size=1792,
        mlp_ratio=3.5,
        num_heads=28,
        depth=16,
        axes_dim=None,
        theta=10000,
        time_factor=1000.0,
        time_max_period=10000,
        bottleneck_size=None,
        resolution_embeds=False,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__(dtype)
        head_dim = hidden_size // num_heads
        axes_dim = tuple(axes_dim or (head_dim // 2, head_dim // 2))
        if hidden_size % num_heads or sum(axes_dim) != head_dim:
            raise ValueError(
                f"PRX: hidden_size {hidden_size} in {num_heads} heads does not give heads of "
                f"sum(axes_dim {axes_dim}) = {sum(axes_dim)} channels"
            )
        self.patch_size = patch_size
        self.in_channels = self.out_channels = in_channels
        self.axes_dim = axes_dim
        self.theta = theta
        self.time_factor = time_factor
        self.time_max_period = time_max_period
        factory = {"device": device, "dtype": dtype}
        patch_dim = in_channels * patch_size**2
        if bottleneck_size is None:
            self.img_in = operations.Linear(patch_dim, hidden_size, **factory)
        else:
            self.img_in = torch.nn.Sequential(
                operations.Linear(patch_dim, bottleneck_size, **factory),
                operations.Linear(bottleneck_size, hidden_size, **factory),
            )
        self.time_in = MLPEmbedder(256, hidden_size, operations=operations, **factory)
        self.txt_in = operations.Linear(context_in_dim, hidden_size, **factory)
        self.resolution_embedder = (
            ResolutionEmbedder(hidden_size, time_max_period, operations=operations, **factory)
            if resolution_embeds
            else None
        )
        self.blocks = torch.nn.ModuleList(
            PRXBlock(hidden_size, num_heads, mlp_ratio, operations=operations, **factory) for _ in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, patch_dim, operations=operations, **factory)

    def _forward(
        self,
        x,  # [B, C, H, W], the noisy latent (PRX) or picture in [-1, 1] (PRXPixel)
        timesteps,  # [B], flow time 0..1, float32
        context,  # [B, L, context_in_dim]; L may be 0
        attention_mask=None,  # [B, L], nonzero = a real token, or None
        transformer_options=None,
        control=None,
        **_,
    ):
        """The velocity, which is noise minus data, or of the model that works on pixels the clean picture; in the shape
        of what was given.

        Other conditions that a host hands to every model are not this model's and are not read.
        """
        height, width = x.shape[-2:]
        x = pad_to_patch_size(x, self.patch_size)
        rows, columns = x.shape[-2] // self.patch_size, x.shape[-1] // self.patch_size
        img = self.img_in(patchify(x, self.patch_size))
        txt = self.txt_in(context)
        pe = grid_rope((rows, columns), self.axes_dim, self.theta, x.device)
        vec = sinusoidal_embedding(timesteps, 256, max_period=self.time_max_period, scale=self.time_factor)
        vec = self.time_in(vec.to(img.dtype))
        if self.resolution_embedder is not None:
            vec = vec + self.resolution_embedder(x.shape[-2], x.shape[-1], vec)
        attn_mask = None
        if attention_mask is not None:
            attn_mask = F.pad(attention_mask.bool(), (0, img.shape[1]), value=True)

        loop = BlockLoop("single", len(self.blocks), transformer_options or {}, control, self)
        for i, block in enumerate(self.blocks):
            img = loop.run(i, block, {"img": img, "txt": txt, "vec": vec, "pe": pe, "attn_mask": attn_mask})["img"]

        out = unpatchify(self.final_layer(img, vec), self.patch_size, x.shape[-2], x.shape[-1])
        return out[..., :height, :width]
