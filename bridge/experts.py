"""Banks of expert weights among ComfyUI's layers: its mixed-precision operations have one that multiplies expert by
expert, its plain operations have none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.ops
import comfy.quant_ops
import torch

_INT8, _FLOAT8 = "TensorWiseINT8Layout", ("TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout")


class PlainBank(torch.nn.Module, comfy.ops.CastWeightBiasOp):
    """A bank [experts, out, in] that ComfyUI casts, patches and offloads like its linear layers."""

    def __init__(self, num_experts, in_features, out_features, bias=False, device=None, dtype=None):
        super().__init__()
        if bias:
            raise ValueError("this bank has no bias; no model here has one")
        weight = torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(self, x)


def with_banks(operations: Any) -> Any:
    """``operations`` with a bank that multiplies all experts at once."""
    own = getattr(operations, "MoEExperts", None)
    if own is None:
        casts = getattr(operations.Linear, "comfy_cast_weights", False)
        bank = type("MoEExperts", (PlainBank,), {"comfy_cast_weights": casts})
    else:
        bank = type("MoEExperts", (own,), {"forward": _multiply})
    return type(getattr(operations, "__name__", "operations"), (operations,), {"MoEExperts": bank})


def _multiply(bank: Any, x: torch.Tensor) -> torch.Tensor:
    """x: [experts, tokens, in], each expert its own tokens. Returns [experts, tokens, out]."""
    weight, _, stream = comfy.ops.cast_bias_weight(bank, x, offloadable=True)
    out = torch.bmm(x, _floats(bank, weight, x.dtype).transpose(1, 2))
    comfy.ops.uncast_bias_weight(bank, weight, None, stream)
    return out


def _floats(bank: Any, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole bank in ``dtype``: unpacked in one go where a format allows it, else expert by expert; the product is
    one for all either way."""
    if not isinstance(weight, comfy.quant_ops.QuantizedTensor):
        return weight
    params, shape = weight._params, (bank.num_experts, bank.out_features, bank.in_features)
    if weight._layout_cls in _FLOAT8:
        return (weight._qdata.to(params.orig_dtype) * params.scale.to(params.orig_dtype).view(-1, 1, 1)).to(dtype)
    if weight._layout_cls == _INT8 and params.scale.numel() == shape[0] * shape[1]:
        # Below each other, as one matrix. ComfyUI's view of one expert forgets that an int8 weight is rotated.
        tall = replace(params, scale=params.scale.reshape(-1, 1), orig_shape=(shape[0] * shape[1], shape[2]))
        data = weight._qdata.reshape(tall.orig_shape)
        return comfy.quant_ops.QuantizedTensor(data, _INT8, tall).dequantize().to(dtype).view(shape)
    experts = [bank._expert_qt_from(weight, i).dequantize().to(dtype) for i in range(shape[0])]
    return torch.stack(experts)
