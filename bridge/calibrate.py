"""Watches a model's layers while ComfyUI samples it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..host import Sampled, Saved
from ..quant.calibration import Watcher, write_calibration
from .sample import file_of
from .save import new_file

__all__ = ["calibrate"]


def calibrate(model: Any, sample: Callable[[], Sampled], prefix: str) -> Saved:
    """``sample()`` samples ``model``. Raises ValueError when none of its linear layers ran, OutputError."""
    with Watcher().on(model.model.diffusion_model) as watcher:
        settings = sample().settings
    calibration = watcher.calibration(model=os.path.basename(file_of(model) or ""), settings=settings.text)
    path, shown = new_file(prefix)
    write_calibration(calibration, path)
    return Saved(path, f"{shown['filename']}: {len(calibration.layers)} layers", shown)
