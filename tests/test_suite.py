"""The suite itself: it collects under any folder name and says in words what it could not judge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_support import NotComfyUI, comfyui_python, find_comfyui
from support import golden_cases


def make_comfyui(folder: Path) -> Path:
    (folder / "comfy" / "ldm").mkdir(parents=True)
    (folder / "nodes.py").touch()
    return folder


def test_comfyui_is_looked_for_in_the_variable_then_above_the_pack_then_at_home(tmp_path: Path):
    home = tmp_path / "home"
    at_home = make_comfyui(home / "comfy" / "ComfyUI")
    around = make_comfyui(tmp_path / "around")
    named = make_comfyui(tmp_path / "named")
    pack = around / "custom_nodes" / "ComfyUI-NativeDiT"
    elsewhere = tmp_path / "src" / "x"

    assert find_comfyui({"COMFYUI_PATH": str(named)}, pack, home) == named
    assert find_comfyui({}, pack, home) == around
    assert find_comfyui({}, elsewhere, home) == at_home
    assert find_comfyui({}, elsewhere, tmp_path / "nobody") is None


def test_a_wrong_comfyui_path_is_an_error_that_names_it(tmp_path: Path):
    with pytest.raises(NotComfyUI, match=r"COMFYUI_PATH is .*wrong, which holds no ComfyUI"):
        find_comfyui({"COMFYUI_PATH": str(tmp_path / "wrong")}, tmp_path, tmp_path)


def test_comfyui_runs_on_its_own_environment(tmp_path: Path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()

    assert comfyui_python(tmp_path, {}) == python
    assert comfyui_python(tmp_path, {"COMFYUI_PYTHON": "/some/python"}) == Path("/some/python")
    assert comfyui_python(tmp_path / "bare", {}) == Path(sys.executable)


@pytest.mark.parametrize("name", ["ComfyUI-NativeDiT", "x"])
@pytest.mark.parametrize("start", [".", "tests"])
def test_the_suite_collects_in_a_clone_of_any_name(tmp_path: Path, root: Path, name: str, start: str):
    """A root with __init__.py is taken for a package by pytest, and only a valid identifier imports."""
    clone = tmp_path / name
    (clone / "tests" / "sub").mkdir(parents=True)
    (clone / "__init__.py").write_text("raise AssertionError('the root was imported')\n")
    for file in ("pytest.ini", "conftest.py", "support.py", "comfyui_support.py"):
        (clone / "tests" / file).write_bytes((root / "tests" / file).read_bytes())
    test = "import pytest\n\n\n@pytest.mark.comfyui\ndef test_in_comfyui(): ...\n\n\ndef test_alone(): ...\n"
    (clone / "tests" / "sub" / "test_it.py").write_text(test)

    command = [Path(sys.executable).parent / "pytest", "-p", "no:cacheprovider", *(["tests"] if start == "." else [])]
    run = subprocess.run(
        command, cwd=clone / start, env={"HOME": str(tmp_path), "PATH": ""}, capture_output=True, text=True
    )

    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.strip().splitlines()
    assert "1 passed, 1 skipped" in lines[-1]
    assert any(line.startswith("ComfyUI not found: 1 tests that judge the pack in a real ComfyUI") for line in lines)


def test_the_root_is_not_on_sys_path_even_when_pytest_runs_from_it(root: Path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/test_suite.py",
        "-k",
        "on_sys_path_here",
    ]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)

    assert run.returncode == 0, run.stdout + run.stderr


def test_the_root_is_not_on_sys_path_here(root: Path):
    assert root.resolve() not in [Path(entry).resolve() for entry in sys.path]


def test_recordings_are_read_whole():
    cases = golden_cases("prx_pixel")
    if not cases:
        pytest.skip("no recording of prx_pixel at hand")
    case = cases[0]
    assert case.config["in_channels"] == 3
    assert case.weights and case.group("inputs") and case.io["output"].ndim == 4
