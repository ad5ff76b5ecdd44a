"""Fixtures for every test, and what the run says about tests that need a real ComfyUI."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_support import NotComfyUI, comfyui_python, find_comfyui
from support import DATA, ROOT, find_shared

_comfyui: Path | None = None
NO_COMFYUI = "no ComfyUI found"


def pytest_configure(config: pytest.Config) -> None:
    global _comfyui
    # `python -m pytest` puts the folder it is run from there; with the root on it, `import nodes` in a test would find
    # this pack's folder instead of ComfyUI's module.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != os.path.realpath(ROOT)]
    try:
        _comfyui = find_comfyui()
    except NotComfyUI as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _comfyui is not None:
        return
    for item in items:
        if item.get_closest_marker("comfyui"):
            item.add_marker(pytest.mark.skip(reason=NO_COMFYUI))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # From the reports and not from the collection: with several workers, only they collect.
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if NO_COMFYUI in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(
            f"ComfyUI not found: {len(skipped)} tests that judge the pack in a real ComfyUI were skipped; "
            "set COMFYUI_PATH to ComfyUI's folder to run them.",
            yellow=True,
        )


@pytest.fixture(scope="session", autouse=True)
def _one_thread_per_worker() -> None:
    """Workers of pytest-xdist share the processors: threads of their own would only get into each other's way."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def comfyui_path() -> Path:
    """ComfyUI's folder. Tests that use it are marked `comfyui`."""
    if _comfyui is None:
        pytest.skip("no ComfyUI found; mark this test `comfyui`")
    return _comfyui


@pytest.fixture(scope="session")
def comfyui_interpreter(comfyui_path: Path) -> Path:
    """The Python with ComfyUI's packages. Run ComfyUI as a process of its own with it; never import it here."""
    return comfyui_python(comfyui_path)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository, which is the package `nativedit`."""
    return ROOT


@pytest.fixture(scope="session")
def data() -> Path:
    """tests/data: small files that the suite always has."""
    return DATA


@pytest.fixture(scope="session")
def shared() -> Path:
    """../shared beside the repository; a test that needs more of it than tests/data holds is skipped without it."""
    folder = find_shared()
    if folder is None:
        pytest.skip("needs ../shared, the recordings beside the developers' checkout")
    return folder


@pytest.fixture
def single_thread() -> Iterator[None]:
    """One torch thread: references were recorded so, and sums of several threads differ in the last digits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
