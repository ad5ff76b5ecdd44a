"""Files of statistics below an output folder, where the calibrating node writes them."""

from __future__ import annotations

import os
from pathlib import Path

from ..files.errors import FileError
from ..files.paths import contained

__all__ = ["calibration_file", "list_calibrations"]

_SUFFIX = ".safetensors"


def list_calibrations(output: str | os.PathLike, folder: str) -> list[str]:
    """Names of the files below ``output``/``folder``, seen from ``output`` and with ``/``, sorted."""
    root = Path(output)
    found = (path for path in (root / folder).rglob(f"*{_SUFFIX}") if path.is_file())
    return sorted(path.relative_to(root).as_posix() for path in found)


def calibration_file(output: str | os.PathLike, name: str) -> Path:
    """The file of a name as `list_calibrations` gives it. Raises UnsafePath, FileError for one that is gone."""
    path = contained(output, name)
    if not path.is_file():
        raise FileError(
            path, "holds the statistics that were chosen, and is gone: calibrate again, or set calibration to none"
        )
    return path
