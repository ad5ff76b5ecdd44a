"""The wheel holds the pack and nothing else; the registry's archive leaves out what only developers need."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from support import ROOT

GENERATED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "output", "models", "node_modules", "*.pyc", "*.tmp"
)
DEVELOPERS_ONLY = {"tests", "benchmarks", "scripts", "docs"}
MADE_BY_BUILDING = {"build", "nativedit.egg-info"}
DATA_FOLDERS = {"demo", "example_workflows", "locales", "web"}


def shipped(tree: Path) -> set[str]:
    """What a user needs of the tree: every module, and every file that is not a text for developers."""
    names = set()
    for file in tree.rglob("*"):
        path = PurePosixPath(file.relative_to(tree).as_posix())
        if file.is_dir() or path.parts[0] in DEVELOPERS_ONLY | MADE_BY_BUILDING:
            continue
        top_level_text = len(path.parts) == 1 and path.suffix != ".py"
        model_notes = path.suffix == ".md" and path.parts[0] not in DATA_FOLDERS
        if not (top_level_text or model_notes):
            names.add(str(path))
    return names


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that building leaves nothing behind and finds nothing left behind."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("wheel") / "ComfyUI-NativeDiT", ignore=GENERATED))


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--wheel-dir", out]
    command = [sys.executable, "-m", "pip", "wheel", *options, "."]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = out.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_is_pure_python_of_the_packs_name(wheel: zipfile.ZipFile):
    assert Path(wheel.filename).name.startswith("nativedit-")
    assert Path(wheel.filename).name.endswith("-py3-none-any.whl")


def test_the_wheel_holds_the_tree(wheel: zipfile.ZipFile, tree: Path):
    """A new folder belongs into `packages` (or `package-data`) of pyproject.toml."""
    inside = {name.removeprefix("nativedit/") for name in wheel.namelist() if name.startswith("nativedit/")}
    expected = shipped(tree)

    assert sorted(expected - inside) == [], "in the tree but not in the wheel"
    assert sorted(inside - expected) == [], "in the wheel but not meant for users"


def test_the_wheel_carries_the_license_and_the_command(wheel: zipfile.ZipFile):
    info = [name for name in wheel.namelist() if ".dist-info/" in name]
    texts = {PurePosixPath(name).name: wheel.read(name).decode() for name in info}

    assert texts["LICENSE"].lstrip().startswith("GNU GENERAL PUBLIC LICENSE")
    assert "nativedit = nativedit.cli:main" in texts["entry_points.txt"]


def test_the_wheel_requires_nothing_unless_an_extra_is_asked_for(wheel: zipfile.ZipFile):
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = [line for line in wheel.read(metadata).decode().splitlines() if line.startswith("Requires-Dist:")]
    assert requirements and all("extra ==" in line for line in requirements)


def test_the_registry_archive_leaves_out_tests_and_builds(root: Path):
    lines = (root / ".comfyignore").read_text(encoding="utf-8").splitlines()
    patterns = {line for line in lines if line and not line.startswith("#")}

    assert {"tests/", "benchmarks/", "scripts/", "build/", "dist/", "output/", ".venv/"} <= patterns
    assert not patterns & {f"{folder}/" for folder in DATA_FOLDERS}


def test_constraints_pin_every_package_that_the_extras_name(root: Path):
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {_name(requirement) for extra in extras.values() for requirement in extra}
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_name(line) for line in lines if line and not line.startswith("#")}

    assert sorted(named - pinned) == []
    assert all("==" in line for line in lines if line and not line.startswith("#"))


def _name(requirement: str) -> str:
    for separator in "=<>;[ ":
        requirement = requirement.split(separator)[0]
    return requirement.strip().lower().replace("_", "-")
