"""One ComfyUI server at a time, for all tests that judge the pack in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfyui_files as files
import pytest
import torch
from comfyui_server import Server, comfyuis, make_base, python_for, version_of
from comfyui_support import find_comfyui

PROBES = Path(__file__).parent / "probe_pack"
FOUND = comfyuis(find_comfyui())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "comfyui" in metafunc.fixturenames:
        metafunc.parametrize("comfyui", FOUND or [None], indirect=True, ids=lambda c: version_of(c) if c else "none")


@pytest.fixture(scope="session")
def comfyui(request: pytest.FixtureRequest) -> Path:
    """ComfyUI's folder: the one found, and each of $NATIVEDIT_COMFYUI_ALL."""
    return request.param


@pytest.fixture(scope="session")
def server(comfyui: Path, comfyui_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running ComfyUI with the pack and a few tiny models of random weights."""
    base = make_base(tmp_path_factory.mktemp(f"comfyui_{version_of(comfyui)}") / "base")
    shutil.copytree(PROBES, base / "custom_nodes" / "probe_pack", ignore=shutil.ignore_patterns("__pycache__"))
    files.write_models(base / "models")
    files.write_bad_files(base / "models")
    files.write_loras(base / "models" / "loras")
    with Server(comfyui, base, python_for(comfyui, comfyui_path)) as running:
        yield running


@pytest.fixture
def latent(server: Server) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Run a graph and read the latent that its node `save` wrote."""

    def run(graph: dict[str, Any]) -> torch.Tensor:
        outputs = server.run(graph)
        return files.tensors(server.file_of(outputs["save"]["latents"][0]))["latent_tensor"]

    return run
