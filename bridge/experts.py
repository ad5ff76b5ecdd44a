"""Banks of expert weights among ComfyUI's layers: its mixed-precision operations have one that multiplies expert by
expert, its plain operations have none."""

from __future__ import annotations

import sys
from typing import Any

import comfy.ops
import comfy.quant_ops
import torch

from ..quant.banks import multiply, multiply_quantized
from ..quant.formats import Recipe

_FORMATS = {
    "TensorCoreFP8E4M3Layout": "float8_e4m3fn",
    "TensorCoreFP8E5M2Layout": "float8_e5m2",
    "TensorCoreNVFP4Layout": "nvfp4",
    "TensorCoreMXFP8Layout": "mxfp8",
    "TensorWiseINT8Layout": "int8_tensorwise",
    "TensorCoreConvRotW4A4Layout": "convrot_w4a4",
}


class PlainBank(torch.nn.Module, comfy.ops.CastWeightBiasOp):
    """A bank [experts, out, in] that ComfyUI casts, patches and offloads like its linear layers.

    Like them it has no weight before loading where ComfyUI's dynamic memory manager runs: Windows would set all of its
    memory aside, which a mapped file does not need.
    """

    def __init__(self, num_experts, in_features, out_features, bias=False, device=None, dtype=None):
        super().__init__()
        if bias:
            raise ValueError("this bank has no bias; no model here has one")
        self.bias = None
        if _weights_come_later():
            self.weight = None
            self.weight_comfy_model_dtype = dtype
            self._register_load_state_dict_pre_hook(self._take_weight)
        else:
            weight = torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype)
            self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def _take_weight(self, state_dict, prefix, local_metadata, *_):
        """A hook, not a loading function of its own, by which the pack tells layers that read quantized entries."""
        weight = state_dict.get(prefix + "weight")
        if self.weight is None and weight is not None:
            if not local_metadata.get("assign_to_params_buffers", False):
                weight = weight.clone()
            self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(self, x)


def _weights_come_later() -> bool:
    memory = sys.modules.get("comfy.memory_management")  # not in every version
    return bool(getattr(memory, "aimdo_enabled", False))


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
    if isinstance(weight, comfy.quant_ops.QuantizedTensor):
        shape = (bank.num_experts, bank.out_features, bank.in_features)
        out = multiply_quantized(x, *_stored(weight), shape, weight._params.orig_dtype)
    else:
        out = multiply(x, weight)
    comfy.ops.uncast_bias_weight(bank, weight, None, stream)
    return out


def _stored(weight: Any) -> tuple[dict[str, torch.Tensor], Recipe]:
    """A bank as its file has it. ComfyUI's own view of one expert forgets that an int8 weight is rotated."""
    params, layout = weight._params, weight._layout_cls
    if layout not in _FORMATS:
        raise ValueError(
            f"a bank of experts is a {layout}, which this pack can't multiply; it knows {', '.join(_FORMATS)}. "
            "Load a file whose experts are in one of these formats"
        )
    tensors, rotated = {"weight": weight._qdata, "weight_scale": params.scale}, getattr(params, "convrot", True)
    if hasattr(params, "block_scale"):
        tensors |= {"weight_scale": params.block_scale, "weight_scale_2": params.scale}
    group = getattr(params, "convrot_groupsize", None) if rotated else None
    return tensors, Recipe(_FORMATS[layout], convrot_groupsize=group)
