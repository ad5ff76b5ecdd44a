"""What several test files share: recorded fixtures and the two measures they are compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data"


def find_shared() -> Path | None:
    """The folder with the facts and recordings this pack was written from; it lies beside the developers' checkouts."""
    shared = ROOT.parent / "shared"
    return shared if (shared / "goldens").is_dir() else None


@dataclass(frozen=True)
class Golden:
    """One recording of a reference implementation: its weights, inputs, outputs and stages."""

    folder: Path

    def __str__(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.folder / "meta.json").read_text(encoding="utf-8"))

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return _tensors(self.folder / "weights.safetensors")

    @cached_property
    def io(self) -> dict[str, torch.Tensor]:
        return _tensors(self.folder / "io.safetensors")

    @property
    def config(self) -> dict[str, Any]:
        """Constructor arguments of the reference class."""
        return self.meta["config"]

    def group(self, name: str) -> dict[str, torch.Tensor]:
        """`group("inputs")`, `group("stages")`: the recorded tensors below that name, without the prefix."""
        return {key[len(name) + 1 :]: value for key, value in self.io.items() if key.startswith(name + ".")}


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def golden_cases(architecture: str, *, role: str | None = None) -> list[Golden]:
    """The recordings of one architecture, from tests/data/goldens and, where it exists, ../shared/goldens.

    role: only those whose meta says so: "target", "invariance" or "quirk". A case in both places comes once, from
    tests/data. Made for `pytest.mark.parametrize("golden", golden_cases("prx"), ids=str)`.
    """
    roots = [DATA / "goldens"]
    if shared := find_shared():
        roots.append(shared / "goldens")
    found: dict[str, Golden] = {}
    for root in roots:
        for meta in sorted((root / architecture).glob("*/meta.json")):
            found.setdefault(meta.parent.name, Golden(meta.parent))
    return [case for _, case in sorted(found.items()) if role is None or case.meta["role"] == role]


def rel_err(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64."""
    value, reference = value.double().flatten(), reference.double().flatten()
    return float((value - reference).norm() / reference.norm())


def cosine(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Cosine of the angle between the two, flattened, in float64."""
    value, reference = value.double().flatten(), reference.double().flatten()
    return float(value @ reference / (value.norm() * reference.norm()))
