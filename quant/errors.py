"""Errors of quantized checkpoints: they name the file and the layer."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..files import FileError

__all__ = ["Problem", "QuantError"]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a layer can't be used as it stands.

    ``kind``: "undecidable" (the file does not say which of several readings is right), "damaged" (its parts
    contradict each other), "unsupported" (a format that ComfyUI does not read).
    """

    layer: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"layer {self.layer!r} [{self.kind}]: {self.message}"


class QuantError(FileError):
    """A quantized checkpoint can't be read, or a quantization can't be done. ``problems`` lists every layer."""

    def __init__(self, path: str | os.PathLike, problem: str, problems: tuple[Problem, ...] = ()):
        super().__init__(path, problem)
        self.problems = tuple(problems)

    @classmethod
    def of(cls, path: str | os.PathLike, problems: list[Problem]) -> QuantError:
        shown = "\n  ".join(str(problem) for problem in problems[:20])
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        return cls(path, f"{len(problems)} quantized layers can't be read:\n  {shown}{more}", tuple(problems))
