"""One transformer language model, with the differences between families as options.

Used as a text encoder: token ids in, hidden states out; no head, no cache, no sampling. Submodule names are the keys
of Hugging Face's bare layout, so published files load as they are.
"""
# Facts (names, formulas, constants) come from the papers of the families and from running `transformers`, against which
# tests/text_encoders compares every family. Keys: `embed_tokens`, `layers.{i}`, `norm`.

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from .language_model_config import BLOCK_NORMS, CONFIG_FIELDS, LanguageModelConfig


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": _gelu_tanh}


class OffsetRMSNorm(torch.nn.Module):
    """RMS norm scaled by (1 + weight), computed in float32 and rounded once at the end (Gemma's order)."""

    def __init__(self, size: int, eps: float, device=None, dtype=None):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.to(device=x.device, dtype=torch.float32)
        return F.rms_norm(x.float(), scale.shape, scale, self.eps).to(x.dtype)


class Attention(torch.nn.Module):
    def __init__(self, config: LanguageModelConfig, layer: int, norm, factory: dict, operations):
        super().__init__()
        c = config
        self.heads = c.num_attention_heads
        self.kv_heads = c.num_key_value_heads or c.num_attention_heads
        self.head_dim = c.head_dim or c.hidden_size // c.num_attention_heads
        self.scale = (c.query_pre_attn_scalar or self.head_dim) ** -0.5
        self.softcap = c.attn_logit_softcapping
        self.use_rope = c.no_rope_layers is None or bool(c.no_rope_layers[layer])
        self.interleaved = c.rope_interleaved
        output_bias = c.attention_bias if c.o_proj_bias is None else c.o_proj_bias
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = operations.Linear(c.hidden_size, width, bias=c.attention_bias, **factory)
        self.k_proj = operations.Linear(c.hidden_size, kv_width, bias=c.attention_bias, **factory)
        self.v_proj = operations.Linear(c.hidden_size, kv_width, bias=c.attention_bias, **factory)
        self.o_proj = operations.Linear(width, c.hidden_size, bias=output_bias, **factory)
        self.q_norm = norm(self.head_dim) if c.qk_norm else None
        self.k_norm = norm(self.head_dim) if c.qk_norm else None

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], allowed: torch.Tensor | None
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.use_rope:
            q, k = rotate(q, *rope, self.interleaved), rotate(k, *rope, self.interleaved)
        groups = self.heads // self.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if self.softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        else:
            out = softcapped_attention(q, k, v, allowed, self.scale, self.softcap)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, self.heads * self.head_dim))


class MLP(torch.nn.Module):
    def __init__(self, config: LanguageModelConfig, factory: dict, operations):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fused = config.fused_gate_up
        if self.fused:
            self.gate_up_proj = operations.Linear(hidden, 2 * inner, bias=bias, **factory)
        else:
            self.gate_proj = operations.Linear(hidden, inner, bias=bias, **factory)
            self.up_proj = operations.Linear(hidden, inner, bias=bias, **factory)
        self.down_proj = operations.Linear(inner, hidden, bias=bias, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.activation(gate) * up)


class Layer(torch.nn.Module):
    def __init__(self, config: LanguageModelConfig, layer: int, norm, factory: dict, operations):
        super().__init__()
        self.self_attn = Attention(config, layer, norm, factory, operations)
        self.mlp = MLP(config, factory, operations)
        self.norm_names = BLOCK_NORMS[config.block_norms]
        for name in self.norm_names:
            if name is not None:
                setattr(self, name, norm(config.hidden_size))

    def _norm(self, place: int, x: torch.Tensor) -> torch.Tensor:
        name = self.norm_names[place]
        return x if name is None else self.get_submodule(name)(x)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], allowed: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self._norm(1, self.self_attn(self._norm(0, x), rope, allowed))
        return x + self._norm(3, self.mlp(self._norm(2, x)))


class LanguageModel(torch.nn.Module):
    """A decoder-style language model without head; `LanguageModelConfig` lists the options.

    Weights are stored in `dtype`; the computation runs in the dtype that `forward` is asked for, which needs
    `operations` whose layers cast (ComfyUI's, or `ldm.layers.operations.CastOps`) where the two differ.
    """

    def __init__(self, *, device=None, dtype=None, operations=torch.nn, **config):
        super().__init__()
        unknown = sorted(config.keys() - CONFIG_FIELDS)
        if unknown:
            raise ValueError(f"LanguageModel has no option {', '.join(unknown)}; LanguageModelConfig lists them")
        c = self.config = LanguageModelConfig(**config)
        factory = {"device": device, "dtype": dtype}

        def norm(size: int) -> torch.nn.Module:
            if c.rms_norm_offset:
                return OffsetRMSNorm(size, c.rms_norm_eps, **factory)
            return operations.RMSNorm(size, eps=c.rms_norm_eps, **factory)

        self.embed_tokens = operations.Embedding(c.vocab_size, c.hidden_size, **factory)
        self.layers = torch.nn.ModuleList(
            Layer(c, layer, norm, factory, operations) for layer in range(c.num_hidden_layers)
        )
        self.norm = norm(c.hidden_size) if c.final_norm else None

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        layers: Sequence[int] | None = None,
        normed: bool = False,
        last: bool = True,
        compute_dtype: torch.dtype | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Hidden states of a batch of prompts.

        input_ids: [B, L] integers, L may be 0. attention_mask: [B, L], true (or 1) where a token counts, padding on
        either side; None if all count. compute_dtype: dtype of the computation, None for the embeddings' own.

        Returns the last state [B, L, hidden_size] after the final norm. With `layers`, a pair of it and the list of
        the states asked for, numbered as `hidden_states` in transformers: 0 the embeddings, i the output of layer i,
        the last one after the final norm; negative numbers count from the end. States at masked positions are finite
        and mean nothing. normed: the states asked for all pass the final norm. last: False for None in place of the
        last state; layers beyond the deepest one asked for then don't run. Raises IndexError for a layer that does not
        exist.

        Positions count from 0 at the first column, padding included. For a row padded on the left that shifts all of
        its positions by the same amount, which RoPE's relative distances do not see.
        """
        wanted = [self._layer_index(i) for i in layers or ()]
        depth = len(self.layers) if last else max(wanted, default=0)
        x = self.embed_tokens(input_ids)
        if compute_dtype is not None:
            x = x.to(compute_dtype)
        if self.config.embed_scale is not None:
            x = x * x.new_full((), self.config.embed_scale)

        finish = self.norm if normed and self.norm is not None else torch.nn.Identity()
        states = {0: finish(x)} if 0 in wanted else {}
        if x.shape[1] > 0:  # layers of some hosts can't multiply zero rows
            rope = rope_table(self.config, x.shape[1], x.device, x.dtype)
            masks = attention_masks(self.config, x.shape[:2], attention_mask, x.device)
            kinds = self.config.layer_types or ["full_attention"] * len(self.layers)
            for index, layer in enumerate(islice(self.layers, depth)):
                x = layer(x, rope, masks[kinds[index]])
                if index + 1 in wanted:
                    states[index + 1] = finish(x)
            if depth == len(self.layers):
                x = x if self.norm is None else self.norm(x)
                states[depth] = x
        if layers is None:
            return x
        return x if last else None, [states.get(i, x) for i in wanted]

    def _layer_index(self, index: int) -> int:
        count = len(self.layers) + 1
        if not -count <= index < count:
            raise IndexError(f"hidden state {index} does not exist: this model has {count} (0 is the embeddings)")
        return index % count


def rope_table(
    config: LanguageModelConfig, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [length, rotary_dim / 2] of positions 0 .. length - 1, computed in float32."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    dim = int(head_dim * config.partial_rotary_factor)
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    if config.rope_scaling and config.rope_scaling.get("rope_type") == "llama3":
        frequencies = llama3_frequencies(frequencies, config.rope_scaling)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def llama3_frequencies(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Frequencies for long contexts: slow ones are divided by a factor, fast ones kept, and between them is a ramp."""
    # As of Llama 3.1.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * frequencies / scaling["factor"] + ramp * frequencies


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """RoPE on the leading 2 * cos.shape[-1] channels of x [B, H, L, D]; the rest passes through."""
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


def attention_masks(
    config: LanguageModelConfig, shape: tuple[int, int], attention_mask: torch.Tensor | None, device: torch.device
) -> dict[str, torch.Tensor | None]:
    """Per layer type the pairs that may attend: bool [B or 1, 1, L (query), L (key)], or None for all of them."""
    length = shape[1]
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    full = (key <= query)[None, None] if config.causal else None
    if attention_mask is not None:
        keys = attention_mask.to(device=device, dtype=torch.bool)[:, None, None, :]
        full = keys.expand(-1, 1, length, -1) if full is None else full & keys
    masks: dict[str, torch.Tensor | None] = {"full_attention": full}
    if config.sliding_window is not None:
        # A causal window counts the query itself, the bidirectional one does not (as transformers has it).
        near = query - key < config.sliding_window if config.causal else (query - key).abs() <= config.sliding_window
        masks["sliding_attention"] = near[None, None] if full is None else full & near
    return {kind: _never_empty(mask, query == key) for kind, mask in masks.items()}


def _never_empty(allowed: torch.Tensor | None, diagonal: torch.Tensor) -> torch.Tensor | None:
    """Lets a query without any key see itself: a softmax over nothing is NaN, and 0 * NaN spreads to other rows."""
    if allowed is None:
        return None
    return allowed | (diagonal & ~allowed.any(dim=-1, keepdim=True))


def softcapped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float, cap: float
) -> torch.Tensor:
    """softmax(cap * tanh(q k^T * scale / cap)) v, the softmax in float32; the mask applies after the cap."""
    scores = torch.tanh(q @ k.transpose(-2, -1) * scale / cap) * cap
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v
