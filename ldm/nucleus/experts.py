"""A mixture of experts in which every expert chooses its tokens.

All experts take equally many tokens, so one batched product per bank computes them all.
"""
# Source: "expert choice", arXiv 2202.09368.

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ...quant.banks import multiply


class SwiGLU(torch.nn.Module):
    def __init__(self, dim, inner_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.proj = operations.Linear(dim, 2 * inner_dim, bias=False, device=device, dtype=dtype)

    def forward(self, x):
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.silu(gate)


class FeedForward(torch.nn.Module):
    """What every token goes through. Value before gate, unlike in the experts."""

    def __init__(self, dim, inner_dim, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        self.net = torch.nn.Sequential(
            SwiGLU(dim, inner_dim, device=device, dtype=dtype, operations=operations),
            torch.nn.Identity(),  # published keys count a dropout here
            operations.Linear(inner_dim, dim, bias=False, device=device, dtype=dtype),
        )

    def forward(self, x):
        return self.net(x)


class ExpertBank(torch.nn.Module):
    """One matrix per expert, where the host's operations have no bank of their own (``MoEExperts``)."""

    def __init__(self, num_experts, in_features, out_features, bias=False, device=None, dtype=None):
        super().__init__()
        if bias:
            raise ValueError("ExpertBank has no bias; no model here has one")
        at = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(num_experts, out_features, in_features, **at))
        torch.nn.init.uniform_(self.weight, -(in_features**-0.5), in_features**-0.5)

    def forward(self, x):
        """x: [experts, tokens, in], each expert its own tokens. Returns [experts, tokens, out]."""
        return multiply(x, self.weight)


class Experts(torch.nn.Module):
    """Published files hold the banks as bare tensors [experts, in, out]; here and in ComfyUI's files they are layers
    whose weight is [experts, out, in]. Both load; a bank that loads from the former keeps its memory order."""

    banks = ("gate_up_proj", "down_proj")

    def __init__(self, dim, inner_dim, num_experts, device=None, dtype=None, operations=torch.nn):
        super().__init__()
        bank = getattr(operations, "MoEExperts", ExpertBank)
        at = {"bias": False, "device": device, "dtype": dtype}
        self.gate_up_proj = bank(num_experts, dim, 2 * inner_dim, **at)
        self.down_proj = bank(num_experts, inner_dim, dim, **at)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for name in self.banks:
            published = state_dict.pop(prefix + name, None)
            if published is not None:
                state_dict[f"{prefix}{name}.weight"] = published.transpose(1, 2)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, x):
        """x: [experts, tokens, dim], each expert its own tokens; same shape back."""
        gate, value = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * value)


class MoELayer(torch.nn.Module):
    """Every expert takes the ``capacity`` tokens of a picture that it scores highest. A token may be taken by any
    number of experts; by none, it gets the shared expert alone."""

    def __init__(
        self,
        dim,
        inner_dim,
        num_experts,
        capacity_factor,
        use_sigmoid,
        route_scale,
        device=None,
        dtype=None,
        operations=torch.nn,
    ):
        super().__init__()
        factory = {"device": device, "dtype": dtype, "operations": operations}
        self.num_experts = num_experts
        self.capacity_factor = capacity_factor
        self.use_sigmoid = use_sigmoid
        self.route_scale = route_scale
        self.gate = operations.Linear(2 * dim, num_experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(dim, inner_dim, num_experts, **factory)
        self.shared_expert = FeedForward(dim, inner_dim, **factory)

    def capacity(self, tokens: int) -> int:
        return max(1, math.ceil(self.capacity_factor * tokens / self.num_experts))

    def route(self, normed, vec):
        """Who takes what. Returns tokens and weights, [B, experts, capacity]: places 0..L-1, and scores in float32 as
        shares of all the scores by which a token was taken, times ``route_scale``."""
        length = normed.shape[1]
        logits = self.gate(torch.cat((vec[:, None].expand(-1, length, -1), normed), dim=-1))
        scores = logits.float().sigmoid() if self.use_sigmoid else logits.float().softmax(dim=-1)
        # Rounded to the model's dtype before the choice, as in the reference.
        scores = scores.to(logits.dtype).transpose(1, 2)
        chosen, tokens = scores.topk(self.capacity(length), dim=-1, sorted=False)
        chosen, places = chosen.float().flatten(1), tokens.flatten(1)
        total = chosen.new_zeros(chosen.shape[0], length).scatter_add(1, places, chosen)
        shares = chosen / (total.gather(1, places) + 1e-12)
        return tokens, shares.view(tokens.shape) * self.route_scale

    def forward(self, x, normed, vec):
        """x: [B, L, dim] what the experts get; normed: the same before its modulation, and vec: [B, dim] the time, what
        the router gets. Returns [B, L, dim]."""
        batch, length, _ = x.shape
        tokens, weights = self.route(normed, vec)
        start = length * torch.arange(batch, device=x.device)
        tokens = (tokens + start[:, None, None]).transpose(0, 1).flatten(1)  # [experts, B * capacity]
        weights = weights.transpose(0, 1).flatten(1)
        routed = self.experts(x.flatten(0, 1)[tokens])
        routed = (routed * weights[..., None]).to(x.dtype)
        out = self.shared_expert(x).flatten(0, 1)
        return out.index_add(0, tokens.flatten(), routed.flatten(0, 1)).view(x.shape)
