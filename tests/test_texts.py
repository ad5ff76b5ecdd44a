"""The texts keep up with the code: links lead somewhere, and the README knows every model, node and command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from node_schemas import schemas
from support import ROOT

import nativedit

LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]+src=\"([^\"]+)\"")
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "web" / "docs").rglob("*.md")])


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_inside_the_repository_lead_somewhere(text: Path):
    targets = [first or second for first, second in LINK.findall(text.read_text(encoding="utf-8"))]
    local = [target.split("#")[0] for target in targets if not re.match(r"https?:|mailto:|#", target)]

    assert [target for target in local if not (text.parent / target).exists()] == []


def test_the_readme_has_a_row_for_every_model_of_ours(readme: str):
    rows = [line for line in readme.splitlines() if line.startswith("|")]
    titles = [card.title for card in nativedit.architectures() if card.module]

    assert titles
    assert [title for title in titles if not any(f"| [{title}](" in row for row in rows)] == []


def test_the_readme_names_the_files_that_the_cards_know(readme: str):
    ours = [card for card in nativedit.architectures() if card.module]
    names = {(folder, names[0]) for card in ours for folder, names in card.files.items() if names}

    assert [f"models/{folder}/{name}" for folder, name in names if f"`models/{folder}/{name}`" not in readme] == []


def test_the_readme_has_a_row_for_every_node(readme: str):
    assert [schema.display_name for schema in schemas().values() if f"| {schema.display_name} |" not in readme] == []


def test_the_readme_and_the_package_agree_on_versions(readme: str):
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    assert 'requires-python = ">=3.10"' in pyproject and "Python 3.10 or newer" in readme
    assert '"torch>=2.4"' in pyproject and "torch 2.4 or newer" in readme
    assert 'requires-comfyui = ">=0.8.0"' in pyproject and "ComfyUI 0.8 or newer" in readme


def test_the_changelog_follows_the_version():
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert re.search(r"^## \[Unreleased\]", log, re.M)
    assert nativedit.__version__ == "0.1.0" or f"## [{nativedit.__version__}]" in log
