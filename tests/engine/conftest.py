"""A models folder with tiny models of random weights, and a short way to run graphs on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comfyui_files as files
import pytest
import torch
from comfyui_server import MODEL_FOLDERS

sys.path.insert(0, str(Path(__file__).parent))
import prx_files


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in MODEL_FOLDERS:
        (folder / name).mkdir()
    files.write_models(folder)
    files.write_bad_files(folder)
    prx_files.write(folder)
    files.write_loras(folder / "loras")
    return folder


@pytest.fixture
def run(models: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`nativedit.run` with the models above, into tmp_path/output, and nothing left over from another test."""
    import nativedit
    from nativedit import engine

    engine._cache = None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def short(workflow: Any, **options: Any) -> Any:
        options = {"models_dir": models, "output_dir": tmp_path / "output", "progress": False} | options
        return nativedit.run(workflow, **options)

    yield short
    torch.set_num_threads(threads)
    engine._cache = None
