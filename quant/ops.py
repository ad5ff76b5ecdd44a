"""Layers that load comfy_quant entries: pass one of these namespaces as the operations of any module of the pack.

A layer without a marker keeps its dtype and computes in its input's. One with a marker takes the side tensors and the
marker along when it loads, even strictly, and gives them back unchanged. The namespaces differ in how it multiplies:
in the format itself where the device has a fast product for it and the marker does not forbid it, else with the weight
dequantized to the input's dtype; or as ComfyUI does; or always dequantized.
"""
# In this order: QuantOps, ComfyUIOps, DequantizedOps. ComfyUI 0.33 runs integer formats in the format on every device,
# CPU included, and float formats without a calibrated input scale at scale 1.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ..files import TensorInfo
from ..files.dtypes import name_of
from . import cast
from .banks import multiply, multiply_quantized
from .evidence import Evidence, Unsettled, settle
from .formats import FORMATS
from .kitchen import as_quantized_tensor, dequantize_matrix, layout_of
from .layer import Layer, dequantize_tensors, normalised
from .markers import MARKER, encode_marker, parse_marker
from .reader import ROLES

__all__ = ["ComfyUIOps", "DequantizedOps", "QuantOps"]

_INTEGER = frozenset({"int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8"})


class _Quantized(cast.FromFile):
    """What Linear, Embedding and the expert bank share: loading, saving, moving."""

    _products = "auto"
    _layer: Layer | None = None

    @property
    def quantization(self) -> Layer | None:
        """How the weight is stored; None for a plain weight."""
        return self._layer

    def _logical_shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        try:
            self._take_quantized(state_dict, prefix)
        except (Unsettled, ValueError) as error:
            # torch collects these and raises one RuntimeError that names the module.
            errors.append(f"layer {prefix[:-1]!r}: {error}")
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def _take_quantized(self, state_dict: dict[str, torch.Tensor], prefix: str) -> None:
        """Puts the layer's tensors into canonical form in ``state_dict`` and makes places for them."""
        own = {name[len(prefix) :]: name for name in list(state_dict) if name.startswith(prefix)}
        roles = {ROLES[suffix]: name for suffix, name in own.items() if suffix in ROLES}
        marker_name = own.get(MARKER)
        raw = state_dict.pop(marker_name) if marker_name else None
        if "weight" not in roles:
            return
        marker = None if raw is None else parse_marker(raw.cpu().numpy().tobytes())
        tensors = {role: state_dict[name] for role, name in roles.items()}
        evidence = Evidence(
            name=prefix[:-1],
            infos={role: _info(roles[role], tensor) for role, tensor in tensors.items()},
            bias=_info("bias", state_dict[prefix + "bias"]) if "bias" in own else None,
            has_marker=raw is not None,
            marker=marker,
        )
        layer = settle(evidence)
        if layer is None or layer.dialect == "cast":
            return
        layer = self._fitted(layer)
        for name in roles.values():
            del state_dict[name]
        self._make_places(layer, normalised(tensors, layer), state_dict, prefix)

    def _fitted(self, layer: Layer) -> Layer:
        """The layer with this module's own shape, which says how far the format has padded."""
        shape = self._logical_shape()
        expected = FORMATS[layer.recipe.format].entries(shape, layer.recipe)["weight"][1]
        if layer.storage_shape() != expected:
            raise ValueError(
                f"its {layer.recipe.format} weight holds {list(layer.shape)}, this model needs {list(shape)}: "
                "a file of another model or size"
            )
        return replace(layer, shape=shape, exact=True)

    def _make_places(
        self, layer: Layer, tensors: Mapping[str, torch.Tensor], state_dict: dict[str, torch.Tensor], prefix: str
    ) -> None:
        device = self.weight.device if self.weight is not None else tensors["weight"].device
        self._layer = layer
        entries = {**tensors, MARKER: encode_marker(layer.marker())}
        for suffix, tensor in entries.items():
            state_dict[prefix + suffix] = tensor
            place = torch.empty_like(tensor, device=device)
            if suffix == "weight":
                self.weight = torch.nn.Parameter(place, requires_grad=False)
            else:
                self.register_buffer(suffix, place)

    def _apply(self, fn, recurse=True):
        """Moves quantized tensors between devices but never changes their types: ``.to(dtype)`` would widen codes."""
        if self._layer is None:
            return super()._apply(fn, recurse)
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            if tensor is None:
                continue
            moved = fn(tensor)
            if moved.dtype != tensor.dtype and name != "bias":
                moved = tensor.to(moved.device)
            if name in self._parameters:
                self._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
            else:
                self._buffers[name] = moved
        return self

    def _stored(self) -> dict[str, torch.Tensor]:
        """The tensors that hold the weight, by canonical suffix."""
        side = {name: buffer for name, buffer in self._buffers.items() if name.startswith("weight_")}
        return {"weight": self.weight.detach(), **side}

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole weight in ``dtype``, [out, in] or [experts, out, in]."""
        if self._layer is None:
            return self.weight.to(dtype)
        return dequantize_tensors(self._stored(), self._layer.recipe, self._layer.shape, dtype)

    def _uses_format(self, device: torch.device) -> bool:
        """Whether the product runs in the stored format on this device."""
        recipe = self._layer.recipe
        if self._products == "dequantized":
            return False
        if self._products == "comfyui" and recipe.format in _INTEGER:
            return True
        if device.type != "cuda" or (recipe.full_precision and recipe.format not in _INTEGER):
            return False
        return torch.cuda.get_device_capability(device) >= FORMATS[recipe.format].fast_capability


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, name_of(tensor.dtype), tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())


def _product(
    module: _Quantized, x: torch.Tensor, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], bias
) -> torch.Tensor:
    """``x [..., K] @ weight.T + bias`` in the stored format."""
    recipe = module._layer.recipe
    weight = as_quantized_tensor(tensors, recipe, shape, x.dtype)
    flat = x.reshape(-1, x.shape[-1])
    if recipe.format not in _INTEGER:
        flat = _quantized_input(module, flat)
    return F.linear(flat, weight, bias).reshape(*x.shape[:-1], shape[0])


def _quantized_input(module: _Quantized, x: torch.Tensor) -> torch.Tensor:
    from comfy_kitchen.tensor import QuantizedTensor

    name = module._layer.recipe.format
    scale = module._buffers.get("input_scale")
    keywords: dict[str, Any] = {}
    if name.startswith("float8"):
        # ComfyUI casts activations to the weight's type. For e5m2 that is the worse choice (two bits less, and no GPU
        # multiplies e5m2 with e5m2), so the default is e4m3 for both.
        keywords["dtype"] = torch.float8_e4m3fn
        if module._products == "comfyui":
            keywords["dtype"] = module.weight.dtype
            scale = torch.ones((), device=x.device) if scale is None else scale
    if name != "mxfp8":
        keywords["scale"] = scale
    stored, params = layout_of(name).quantize(x, **keywords)
    return QuantizedTensor(stored, FORMATS[name].layout, params)


class _Linear(_Quantized, cast.Linear):
    def _logical_shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._layer is None:
            return super().forward(x)
        factor = self._buffers.get("pre_quant_scale")
        if factor is not None:
            x = x * factor.to(device=x.device, dtype=x.dtype)
        bias = None if self.bias is None else self.bias.to(device=x.device, dtype=x.dtype)
        if self._uses_format(x.device):
            return _product(self, x, self._stored(), self._layer.shape, bias)
        return F.linear(x, self.dequantized(x.dtype), bias)


class _Embedding(_Quantized, cast.Embedding):
    """A table whose quantized rows come out in the dtype that is asked for, in bfloat16 when none is.

    As in ComfyUI, rows of integers are rounded to bfloat16 first, rows of floats are computed in that dtype.
    """

    def _logical_shape(self) -> tuple[int, int]:
        return self.num_embeddings, self.embedding_dim

    def forward(self, ids: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._layer is None:
            rows = F.embedding(ids, self.weight.to(torch.bfloat16) if cast.is_float8(self.weight) else self.weight)
            return rows if out_dtype is None else rows.to(out_dtype)
        recipe, stored = self._layer.recipe, self._stored()
        dtype = torch.bfloat16 if recipe.format == "int8_tensorwise" or out_dtype is None else out_dtype
        flat = ids.reshape(-1)
        if stored["weight_scale"].numel() > 1:
            stored["weight_scale"] = stored["weight_scale"].reshape(-1, 1).index_select(0, flat)
        # Codes are gathered as bytes: index_select has no float8 kernel on a CPU.
        codes = stored["weight"].view(torch.uint8).index_select(0, flat).view(stored["weight"].dtype)
        rows = dequantize_matrix({**stored, "weight": codes}, recipe, dtype)
        return rows.reshape(*ids.shape, self.embedding_dim).to(out_dtype or dtype)


class _MoEExperts(_Quantized, torch.nn.Module):
    """A bank of expert weights, with the constructor and the methods of the class that ComfyUI has for them."""

    # ComfyUI's MoEExperts; the weights are [experts, out, in].

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None
    ):
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        keywords = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(
            torch.empty(num_experts, out_features, in_features, **keywords), requires_grad=False
        )
        values = torch.empty(num_experts, out_features, **keywords) if bias else None
        self.bias = None if values is None else torch.nn.Parameter(values, requires_grad=False)

    def _logical_shape(self) -> tuple[int, int, int]:
        return self.num_experts, self.out_features, self.in_features

    def _expert(self, index: int) -> dict[str, torch.Tensor]:
        return {suffix: tensor if tensor.ndim == 0 else tensor[index] for suffix, tensor in self._stored().items()}

    def expert_weight(self, index: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Expert ``index``'s weight [out, in] in ``dtype``."""
        if self._layer is None:
            return self.weight[index].to(dtype)
        own = dequantize_matrix(self._expert(index), self._layer.recipe, dtype)
        return own[: self.out_features, : self.in_features]

    def expert_linear(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """``x [..., in]`` through expert ``index``: [..., out]."""
        bias = None if self.bias is None else self.bias[index].to(device=x.device, dtype=x.dtype)
        if self._layer is None:
            return F.linear(x, self.weight[index].to(device=x.device, dtype=x.dtype), bias)
        if self._uses_format(x.device):
            return _product(self, x, self._expert(index), (self.out_features, self.in_features), bias)
        weight = self.expert_weight(index, x.dtype)
        if self._products == "comfyui-bank":
            out = x @ weight.t()
            return out if bias is None else out + bias  # rounded twice, as ComfyUI does it
        return F.linear(x, weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [experts, tokens, in]``, each expert its own tokens: [experts, tokens, out].

        Always with dequantized weights: no kernel multiplies a bank in a format, and 64 small products one after the
        other cost more than they save.
        """
        if self._layer is None:
            out = multiply(x, self.weight)
        else:
            stored = {suffix: tensor.to(x.device) for suffix, tensor in self._stored().items()}
            out = multiply_quantized(x, stored, self._layer.recipe, self._layer.shape)
        return out if self.bias is None else out + self.bias.to(device=x.device, dtype=x.dtype).unsqueeze(1)


class QuantOps:
    """Multiplies in the stored format where the device is fast at it, else dequantized."""

    RMSNorm = cast.RMSNorm
    LayerNorm = cast.LayerNorm
    GroupNorm = cast.GroupNorm
    Conv1d = cast.Conv1d
    Conv2d = cast.Conv2d
    Conv3d = cast.Conv3d

    class Linear(_Linear):
        pass

    class Embedding(_Embedding):
        pass

    class MoEExperts(_MoEExperts):
        pass


class ComfyUIOps(QuantOps):
    """The same numbers as ComfyUI 0.33: integer formats in the format on every device."""

    class Linear(_Linear):
        _products = "comfyui"

    class Embedding(_Embedding):
        _products = "comfyui"

    class MoEExperts(_MoEExperts):
        """ComfyUI's banks multiply in the format only where the device is fast at it, integers too."""

        _products = "comfyui-bank"


class DequantizedOps(QuantOps):
    """Every weight is dequantized before it is used: slower, and the reference for the other two."""

    class Linear(_Linear):
        _products = "dequantized"

    class Embedding(_Embedding):
        _products = "dequantized"

    class MoEExperts(_MoEExperts):
        _products = "dequantized"
