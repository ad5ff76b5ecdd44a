"""The encoder of T5 v1.1: token ids in, hidden states out.

Submodule names are the keys of the published files. Positions are relative, in buckets, and there is no scale on the
attention scores; the gate is a gelu.
"""
# Facts: the paper (arXiv 1910.10683: relative position buckets, no scale on attention scores), the v1.1 notes (gated
# gelu, no ties), key names of google/t5-v1_1-xxl (`shared`, `encoder.block.{i}.layer.{0,1}`, ...); compared with
# `transformers` in tests/text_encoders.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import islice

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class T5Config:
    """Sizes under the names that all text encoders here have; position buckets under those of Hugging Face."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int = 64
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6


CONFIG_FIELDS = frozenset(field.name for field in fields(T5Config))


def position_buckets(length: int, buckets: int, max_distance: int, device: torch.device) -> torch.Tensor:
    """[L (query), L (key)] bucket of each distance key - query: half of them for keys behind, and in each half every
    near distance has its own, far ones share buckets that widen with the logarithm up to ``max_distance``."""
    position = torch.arange(length, device=device)
    distance = position[None, :] - position[:, None]
    half = buckets // 2
    exact = half // 2
    away = distance.abs()
    wide = exact + (away.float().clamp(min=1) / exact).log() / math.log(max_distance / exact) * (half - exact)
    bucket = torch.where(away < exact, away, wide.long().clamp(max=half - 1))
    return bucket + half * (distance > 0)


class SelfAttention(torch.nn.Module):
    def __init__(self, c: T5Config, with_bias: bool, factory: dict, operations):
        super().__init__()
        width = c.num_attention_heads * c.head_dim
        self.heads, self.head_dim = c.num_attention_heads, c.head_dim
        self.q = operations.Linear(c.hidden_size, width, bias=False, **factory)
        self.k = operations.Linear(c.hidden_size, width, bias=False, **factory)
        self.v = operations.Linear(c.hidden_size, width, bias=False, **factory)
        self.o = operations.Linear(width, c.hidden_size, bias=False, **factory)
        if with_bias:
            self.relative_attention_bias = operations.Embedding(
                c.relative_attention_num_buckets, c.num_attention_heads, **factory
            )

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """x: [B, L, hidden_size]; bias: [B or 1, heads, L, L], added to the scores, which are not scaled."""
        q, k, v = (p(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(out.transpose(1, 2).flatten(2))


class AttentionLayer(torch.nn.Module):
    def __init__(self, c: T5Config, with_bias: bool, factory: dict, operations):
        super().__init__()
        self.SelfAttention = SelfAttention(c, with_bias, factory, operations)
        self.layer_norm = operations.RMSNorm(c.hidden_size, eps=c.layer_norm_epsilon, **factory)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + self.SelfAttention(self.layer_norm(x), bias)


class GatedGELU(torch.nn.Module):
    def __init__(self, c: T5Config, factory: dict, operations):
        super().__init__()
        self.wi_0 = operations.Linear(c.hidden_size, c.intermediate_size, bias=False, **factory)
        self.wi_1 = operations.Linear(c.hidden_size, c.intermediate_size, bias=False, **factory)
        self.wo = operations.Linear(c.intermediate_size, c.hidden_size, bias=False, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class FeedForwardLayer(torch.nn.Module):
    def __init__(self, c: T5Config, factory: dict, operations):
        super().__init__()
        self.DenseReluDense = GatedGELU(c, factory, operations)
        self.layer_norm = operations.RMSNorm(c.hidden_size, eps=c.layer_norm_epsilon, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class Block(torch.nn.Module):
    def __init__(self, c: T5Config, with_bias: bool, factory: dict, operations):
        super().__init__()
        self.layer = torch.nn.ModuleList(
            (AttentionLayer(c, with_bias, factory, operations), FeedForwardLayer(c, factory, operations))
        )

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.layer[1](self.layer[0](x, bias))


class Stack(torch.nn.Module):
    def __init__(self, c: T5Config, factory: dict, operations):
        super().__init__()
        # The first block holds the position bias of all.
        self.block = torch.nn.ModuleList(Block(c, i == 0, factory, operations) for i in range(c.num_hidden_layers))
        self.final_layer_norm = operations.RMSNorm(c.hidden_size, eps=c.layer_norm_epsilon, **factory)


class T5Encoder(torch.nn.Module):
    """float16 overflows from the middle layers on: compute in bfloat16 or float32.

    Weights are stored in `dtype`; the computation runs in the dtype that `forward` is asked for.
    """

    def __init__(self, *, device=None, dtype=None, operations=torch.nn, **config):
        super().__init__()
        unknown = sorted(config.keys() - CONFIG_FIELDS)
        if unknown:
            raise ValueError(f"T5Encoder has no option {', '.join(unknown)}; T5Config lists them")
        c = self.config = T5Config(**config)
        factory = {"device": device, "dtype": dtype}
        self.shared = operations.Embedding(c.vocab_size, c.hidden_size, **factory)
        self.encoder = Stack(c, factory, operations)

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
        """Hidden states of a batch of prompts; arguments and result as of LanguageModel.forward.

        input_ids: [B, L] integers; attention_mask: [B, L], true where a token is attended to, None for all; layers:
        which hidden states to return besides the last; normed: after the final norm too; last: False for those alone.
        """
        c = self.config
        wanted = [self._layer_index(i) for i in layers or ()]
        depth = c.num_hidden_layers if last else max(wanted, default=0)
        x = self.shared(input_ids)
        if compute_dtype is not None:
            x = x.to(compute_dtype)
        finish = self.encoder.final_layer_norm if normed else torch.nn.Identity()
        states = {0: finish(x)} if 0 in wanted else {}
        if x.shape[1] > 0:  # layers of some hosts can't multiply zero rows
            bias = self._bias(x.shape[1], attention_mask, x)
            for index, block in enumerate(islice(self.encoder.block, depth)):
                x = block(x, bias)
                if index + 1 in wanted:
                    states[index + 1] = finish(x)
            if depth == c.num_hidden_layers:
                x = self.encoder.final_layer_norm(x)
                states[depth] = x
        if layers is None:
            return x
        return x if last else None, [states.get(i, x) for i in wanted]

    def _bias(self, length: int, attention_mask: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """[B or 1, heads, L, L] of x's dtype."""
        c = self.config
        buckets = position_buckets(
            length, c.relative_attention_num_buckets, c.relative_attention_max_distance, x.device
        )
        table = self.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
        bias = table(buckets).to(x.dtype).permute(2, 0, 1)[None]
        if attention_mask is None:
            return bias
        hidden = ~attention_mask.to(device=x.device, dtype=torch.bool)[:, None, None, :]
        return bias.masked_fill(hidden, torch.finfo(x.dtype).min)

    def _layer_index(self, index: int) -> int:
        count = self.config.num_hidden_layers + 1
        if not -count <= index < count:
            raise IndexError(f"hidden state {index} does not exist: this model has {count} (0 is the embeddings)")
        return index % count
