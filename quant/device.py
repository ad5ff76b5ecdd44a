"""Where weights are quantized."""

from __future__ import annotations

import torch

__all__ = ["device_named"]


def device_named(name: str | torch.device | None) -> torch.device:
    """The device, or the best one there is for None. Raises ValueError for one that does not exist here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name}: this torch ({torch.__version__}) sees no CUDA device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device
