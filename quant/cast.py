"""Plain layers that keep the dtype they are stored in and compute in the dtype of their input.

The base of `quant.ops`. Parameters are left uninitialised: they come from a file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["Conv1d", "Conv2d", "Conv3d", "Embedding", "GroupNorm", "LayerNorm", "Linear", "RMSNorm", "is_float8"]


def is_float8(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize == 1


def at_input(parameter: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The parameter in the dtype and on the device of ``x``; None stays None."""
    return None if parameter is None else parameter.to(device=x.device, dtype=x.dtype)


class FromFile:
    """Takes parameters as they come, except one-dimensional float8: a norm or bias in float8 meets float tensors in
    plain sums, which torch refuses. They are widened to bfloat16."""

    def reset_parameters(self) -> None:
        pass

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in list(self._parameters):
            tensor = state_dict.get(prefix + name)
            if tensor is not None and tensor.ndim < 2 and is_float8(tensor):
                state_dict[prefix + name] = tensor.to(torch.bfloat16)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Linear(FromFile, torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, at_input(self.weight, x), at_input(self.bias, x))


class Embedding(FromFile, torch.nn.Embedding):
    pass


class RMSNorm(FromFile, torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, at_input(self.weight, x), self.eps)


class LayerNorm(FromFile, torch.nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, at_input(self.weight, x), at_input(self.bias, x), self.eps)


class GroupNorm(FromFile, torch.nn.GroupNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, self.num_groups, at_input(self.weight, x), at_input(self.bias, x), self.eps)


class _Conv(FromFile):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, at_input(self.weight, x), at_input(self.bias, x))


class Conv1d(_Conv, torch.nn.Conv1d):
    pass


class Conv2d(_Conv, torch.nn.Conv2d):
    pass


class Conv3d(_Conv, torch.nn.Conv3d):
    pass
