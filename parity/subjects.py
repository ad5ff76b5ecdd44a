"""What `nativedit compare` is given: an architecture's name, a checkpoint, or a fixture (a reference's recording)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.load import load_diffusion_model, recognise
from ..checkpoints.opened import open_checkpoint
from ..files.errors import FileError
from ..files.source import open_source
from ..supported_models import Architecture, find_architecture, get_architecture
from .build import build_ours, random_module
from .port import Port
from .ports import find_port, port_of_fixture

__all__ = ["Fixture", "Subject", "open_subject"]

_FIXTURE_FILES = ("meta.json", "weights.safetensors", "io.safetensors")


@dataclass(frozen=True)
class Fixture:
    """A folder with a reference's weights, inputs, output and stages; see docs/parity.md."""

    folder: Path

    @staticmethod
    def is_one(path: str | os.PathLike) -> bool:
        return all((Path(path) / name).is_file() for name in _FIXTURE_FILES)

    @cached_property
    def meta(self) -> dict[str, Any]:
        path = self.folder / "meta.json"
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            meta["config"], meta["architecture"]
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(
                path, f"is no fixture's description, which has architecture and config: {error!r}"
            ) from error
        return meta

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return _tensors(self.folder / "weights.safetensors")

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        return _tensors(self.folder / "io.safetensors")

    def group(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors below "inputs" or "stages", without that prefix."""
        return {key[len(name) + 1 :]: value for key, value in self.tensors.items() if key.startswith(name + ".")}

    @property
    def recorded(self) -> dict[str, torch.Tensor]:
        return self.group("stages") | {"output": self.tensors["output"]}


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    with open_source(path) as source:
        return {key: source.read(key) for key in source}


@dataclass(frozen=True)
class Subject:
    """text: as given; card, port: whose; config: constructor arguments; fixture, path: where from, else random."""

    text: str
    card: Architecture
    port: Port
    config: Mapping[str, Any]
    fixture: Fixture | None = None
    path: str | None = None

    @property
    def title(self) -> str:
        if self.fixture is not None:
            return f"{self.text} (recording)"
        return self.text if self.path is not None else f"{self.text} (tiny, random weights)"

    def module(self, dtype: torch.dtype, generator: torch.Generator, config: Mapping[str, Any] | None = None):
        """Our module with its weights, computed in ``dtype``; config: arguments that its shapes can't tell."""
        if self.path is not None:
            return load_diffusion_model(self.path, architecture=self.card.name, config=config, dtype=dtype)
        if self.fixture is not None:
            return build_ours(self.card.module_class(), self.config, self.fixture.weights, dtype)
        return random_module(self.card, self.config, generator).to(dtype)


def open_subject(text: str | os.PathLike, *, architecture: str | None = None) -> Subject:
    """Raises FileError for a file that is no diffusion model of ours, ValueError for an unknown architecture."""
    text = os.fspath(text)
    if Fixture.is_one(text):
        fixture = Fixture(Path(text))
        port = port_of_fixture(fixture.meta["architecture"])
        match = find_architecture({key: tuple(value.shape) for key, value in fixture.weights.items()})
        card = match.architecture if match and match.architecture.name in port.tiny else None
        card = card or get_architecture(next(iter(port.tiny)))
        return Subject(text, card, port, fixture.meta["config"], fixture=fixture)
    if os.path.exists(text):
        with open_checkpoint(text, component="transformer") as checkpoint:
            match = recognise(checkpoint, architecture=architecture)
        _our_own(match.architecture)
        return Subject(text, match.architecture, find_port(match.architecture.name), match.config, path=text)
    if os.sep in text or text.endswith(".safetensors"):
        raise FileNotFoundError(f"{text}: there is no such file or folder")
    card = get_architecture(text)
    _our_own(card)
    port = find_port(card.name)
    return Subject(text, card, port, port.tiny[card.name])


def _our_own(card: Architecture) -> None:
    if card.module is None:
        raise ValueError(f"{card.title} runs with ComfyUI's own code: there is no module of ours to compare")
