"""Layers that keep the dtype they are stored in and compute in the dtype of their input.

The counterpart of what ComfyUI calls manual casting: weights of a bfloat16 file stay bfloat16 in memory, and a
float32 input is multiplied with the weights widened to float32. `CastOps` is passed as `operations=` wherever
`torch.nn` could be; names it does not have are torch's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _at(parameter: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The parameter in the dtype and on the device of `x`; None stays None."""
    return None if parameter is None else parameter.to(device=x.device, dtype=x.dtype)


class _FromFile:
    """Leaves parameters uninitialised: they come from a checkpoint, and filling billions twice takes minutes."""

    def reset_parameters(self) -> None:
        pass


class CastOps:
    """A namespace of layers with torch.nn's constructors; see the module's docstring."""

    class Linear(_FromFile, torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, _at(self.weight, x), _at(self.bias, x))

    class Embedding(_FromFile, torch.nn.Embedding):
        """Returns rows in the storage dtype: ids carry no dtype to cast to, the caller chooses."""

    class RMSNorm(_FromFile, torch.nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, self.normalized_shape, _at(self.weight, x), self.eps)

    class LayerNorm(_FromFile, torch.nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, self.normalized_shape, _at(self.weight, x), _at(self.bias, x), self.eps)

    class GroupNorm(_FromFile, torch.nn.GroupNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.group_norm(x, self.num_groups, _at(self.weight, x), _at(self.bias, x), self.eps)

    class Conv1d(_FromFile, torch.nn.Conv1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, _at(self.weight, x), _at(self.bias, x))

    class Conv2d(_FromFile, torch.nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, _at(self.weight, x), _at(self.bias, x))

    class Conv3d(_FromFile, torch.nn.Conv3d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, _at(self.weight, x), _at(self.bias, x))
