"""1x1 convolutions computed as linear layers, under the shapes they are published with."""

from __future__ import annotations

import torch


class PointwiseLayers(torch.nn.Module):
    """Base of a module whose children named in ``pointwise`` are linear layers, stored as 1x1 convolutions.

    A checkpoint says [out, in, 1, 1] and so does ``state_dict``, unless the layer is quantized: then it is a matrix
    there too. The layer itself holds [out, in] and is given tokens, channels last. A matrix is what hosts quantize and
    what every processor multiplies fast (bfloat16 convolutions run at a tenth of the speed of a matrix product on
    processors without instructions for them).
    """

    pointwise: tuple[str, ...] = ()

    def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
        """As torch's. With ``keep_vars`` the parameters themselves, which are matrices."""
        state = super().state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        for key in () if keep_vars else self._weights(prefix):
            quantized = key.removesuffix("weight") + "comfy_quant" in state
            if key in state and state[key].ndim == 2 and not quantized:
                state[key] = state[key][:, :, None, None]
        return state

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for key in self._weights(prefix):
            if key in state_dict and tuple(state_dict[key].shape[2:]) == (1, 1):
                state_dict[key] = state_dict[key].flatten(1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _weights(self, prefix: str) -> list[str]:
        return [f"{prefix}{name}.weight" for name in self.pointwise]
