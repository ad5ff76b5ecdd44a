"""What ComfyUI's documentation and registry ask: pyproject, example workflows, help pages, locales, lasting schemas."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_schemas import LOCALES, RECORDED, breaks, described, english, node_classes, schemas
from support import ROOT

SEMVER = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.-]+)?")
UI_ONLY = {"Note", "MarkdownNote", "Reroute", "PrimitiveNode"}
EXAMPLES = ROOT / "example_workflows"


def workflows() -> list[Path]:
    return sorted(EXAMPLES.glob("*.json"))


every_workflow = pytest.mark.parametrize("workflow", workflows(), ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# pyproject.toml, as the registry reads it


def test_the_project_name_is_one_the_registry_takes(pyproject: dict[str, Any]):
    name = pyproject["project"]["name"]

    assert re.fullmatch(r"[a-z][a-z0-9_-]{0,98}", name)
    assert "comfyui" not in name


def test_the_version_is_semantic_and_the_packages_own(pyproject: dict[str, Any]):
    import nativedit

    assert SEMVER.fullmatch(pyproject["project"]["version"])
    assert pyproject["project"]["version"] == nativedit.__version__


def test_the_license_is_a_table_and_the_file_says_the_same(pyproject: dict[str, Any]):
    assert pyproject["project"]["license"] == {"text": "GPL-3.0-or-later"}
    assert "Version 3, 29 June 2007" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_addresses_are_on_https(pyproject: dict[str, Any]):
    urls = pyproject["project"]["urls"]

    assert {"Homepage", "Repository"} <= set(urls)
    assert all(url.startswith("https://") for url in urls.values())


def test_the_comfy_table_names_publisher_title_icon_and_version(pyproject: dict[str, Any]):
    comfy = pyproject["tool"]["comfy"]

    assert comfy["PublisherId"] == "nativedit"
    assert comfy["DisplayName"] == "NativeDiT"
    assert comfy["requires-comfyui"] == ">=0.8.0"
    # `web` here would serve web/ a second time, under a name that no help page is looked up by.
    assert "web" not in comfy


def test_the_icon_exists_in_the_repository_at_its_address(pyproject: dict[str, Any]):
    icon = pyproject["tool"]["comfy"]["Icon"]
    repository = pyproject["project"]["urls"]["Repository"].removeprefix("https://github.com/")
    prefix = f"https://raw.githubusercontent.com/{repository}/main/"

    assert icon.startswith(prefix)
    assert (ROOT / icon.removeprefix(prefix)).is_file()


def test_inside_comfyui_nothing_is_installed(pyproject: dict[str, Any]):
    assert pyproject["project"]["dependencies"] == []
    assert not (ROOT / "requirements.txt").exists(), "the Manager would install it"
    assert not (ROOT / "install.py").exists(), "the Manager would run it"


def test_extras_state_minimums_and_pin_nothing(pyproject: dict[str, Any]):
    extras = pyproject["project"]["optional-dependencies"]

    assert "torch>=2.4" in extras["standalone"]
    assert [requirement for extra in extras.values() for requirement in extra if "==" in requirement] == []


def test_the_registry_finds_nothing_to_warn_of():
    """The very rules that `comfy node validate` (comfy-cli 1.23) runs: exec, eval, several statements on a line."""
    command = [sys.executable, "-m", "ruff", "check", ".", "-q", "--no-cache", "--select", "S102,S307,E702"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert (run.returncode, run.stdout) == (0, ""), run.stdout + run.stderr


# example_workflows/, as the template browser lists it and as the headless engine runs it


def test_there_is_an_example():
    assert workflows(), "example_workflows/ holds no workflow"


@every_workflow
def test_a_workflow_has_a_thumbnail(workflow: Path):
    assert workflow.with_suffix(".jpg").read_bytes()[:3] == b"\xff\xd8\xff", "a JPEG file is expected"


@every_workflow
def test_a_workflow_has_an_api_form_of_the_same_graph(workflow: Path):
    graph = json.loads(workflow.read_text(encoding="utf-8"))
    prompt = json.loads((EXAMPLES / "api" / workflow.name).read_text(encoding="utf-8"))

    assert all({"class_type", "inputs"} <= set(node) for node in prompt.values())
    drawn = Counter(node["type"] for node in ui_nodes(graph) if node["type"] not in UI_ONLY)
    assert Counter(node["class_type"] for node in prompt.values()) == drawn


def test_every_api_workflow_has_its_ui_form():
    assert sorted(path.name for path in (EXAMPLES / "api").glob("*.json")) == [path.name for path in workflows()]


@every_workflow
def test_our_nodes_carry_the_registry_id_and_a_version(workflow: Path):
    for node in ui_nodes(json.loads(workflow.read_text(encoding="utf-8"))):
        if node["type"].startswith("NativeDiT"):
            assert node["properties"]["cnr_id"] == "nativedit", node["type"]
            assert SEMVER.fullmatch(node["properties"]["ver"]), node["type"]


@every_workflow
def test_a_node_that_names_a_model_file_says_where_it_comes_from(workflow: Path):
    """`properties.models` lets ComfyUI and its Manager offer the download."""
    for node in ui_nodes(json.loads(workflow.read_text(encoding="utf-8"))):
        listed = {model["name"]: model for model in node.get("properties", {}).get("models", [])}
        # Some of our nodes take files of several folders and name the folder too.
        folders = tuple(f"{model['directory']}/" for model in listed.values())
        files = [
            next((value.removeprefix(folder) for folder in folders if value.startswith(folder)), value)
            for value in widget_values(node)
            if str(value).endswith(".safetensors")
        ]
        assert set(files) <= set(listed), f"{workflow.name}: node {node['id']} {node['type']}"
        for name, model in listed.items():
            assert name in files, f"{workflow.name}: node {node['id']} lists {name} and does not use it"
            assert model["url"].startswith("https://") and model["directory"], name


def ui_nodes(graph: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from graph["nodes"]
    for subgraph in graph.get("definitions", {}).get("subgraphs", []):
        yield from subgraph["nodes"]


def widget_values(node: dict[str, Any]) -> list[Any]:
    values = node.get("widgets_values") or []
    return list(values.values()) if isinstance(values, dict) else values


# nodes: help pages, texts in every language, and schemas that stay


@pytest.fixture(scope="module")
def nodes() -> dict[str, Any]:
    return schemas()


def test_node_ids_are_ours_and_named_like_their_class(nodes: dict[str, Any]):
    assert [cls.__name__ for cls in node_classes()] == list(nodes)
    assert all(node.startswith("NativeDiT") for node in nodes)


def test_every_node_has_a_help_page_and_every_page_a_node(nodes: dict[str, Any]):
    assert sorted(page.stem for page in (ROOT / "web" / "docs").glob("*.md")) == sorted(nodes)


def test_a_help_page_speaks_of_every_input_and_output(nodes: dict[str, Any]):
    for node, schema in nodes.items():
        page = (ROOT / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
        missing = [item.id for item in schema.inputs if f"`{item.id}`" not in page]
        missing += [item.io_type for item in schema.outputs if f"`{item.io_type}`" not in page]
        assert missing == [], f"{node}.md"


def test_every_node_and_socket_has_a_text(nodes: dict[str, Any]):
    for node, schema in nodes.items():
        assert schema.display_name and schema.description and schema.category.startswith("NativeDiT"), node
        assert [item.id for item in schema.inputs if not item.tooltip] == [], node
        assert [index for index, item in enumerate(schema.outputs) if not item.tooltip] == [], node


def test_english_texts_are_those_of_the_schemas(nodes: dict[str, Any]):
    """`node_schemas.py --record` writes them."""
    assert locale("en") == {node: english(schema) for node, schema in nodes.items()}


@pytest.mark.parametrize("language", ["zh", "ja"])
def test_every_language_has_the_texts_that_english_has(language: str):
    assert set(keys(locale(language))) == set(keys(locale("en")))
    assert all(text.strip() for text in keys(locale(language)).values())


def test_every_locale_is_checked():
    assert sorted(folder.name for folder in LOCALES.iterdir()) == ["en", "ja", "zh"]


def test_a_workflow_saved_before_still_loads(nodes: dict[str, Any]):
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    now = {node: described(schema) for node, schema in nodes.items()}

    assert breaks(recorded, now) == []
    assert without_choices(now) == without_choices(recorded), "compatible, but not recorded: node_schemas.py --record"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda node: node["inputs"].insert(0, dict(id="new", type="INT", optional=False, default=1)), "moved"),
        (lambda node: node["inputs"].append(dict(id="new", type="INT", optional=False)), "must be optional"),
        (lambda node: node["inputs"].pop(), "removed"),
        (lambda node: node["inputs"][0].update(id="other"), "renamed"),
        (lambda node: node["inputs"][0].update(type="FLOAT"), "was INT and is FLOAT"),
        (lambda node: node["inputs"][0].update(min=1), "minimum rose to 1"),
        (lambda node: node["inputs"][0].update(max=8), "maximum fell to 8"),
        (lambda node: node["inputs"][1].update(options=["auto"]), r"choices are gone: \['prx'\]"),
        (lambda node: node.update(outputs=["MODEL"]), "outputs were changed"),
    ],
)
def test_a_change_that_breaks_saved_workflows_is_seen(change: Any, problem: str):
    old, new = two_schemas()
    change(new["NativeDiTX"])

    (found,) = breaks(old, new)
    assert re.search(problem, found)


def test_a_change_that_breaks_nothing_is_allowed():
    old, new = two_schemas()
    new["NativeDiTX"]["inputs"][0].update(max=99)
    new["NativeDiTX"]["inputs"][1]["options"].append("sana")
    new["NativeDiTX"]["inputs"].append(dict(id="new", type="INT", optional=False, default=1))
    new["NativeDiTX"]["outputs"].append("IMAGE")
    new["NativeDiTY"] = new["NativeDiTX"]

    assert breaks(old, new) == []


def without_choices(schemas: dict[str, Any]) -> dict[str, Any]:
    """A new architecture is one more choice in several nodes, and needs no recording."""
    schemas = copy.deepcopy(schemas)
    for node in schemas.values():
        for item in node["inputs"]:
            item.pop("options", None)
    return schemas


def two_schemas() -> list[dict[str, Any]]:
    width = {"id": "width", "type": "INT", "optional": False, "default": 0, "min": 0, "max": 64}
    name = {"id": "name", "type": "COMBO", "optional": False, "options": ["auto", "prx"]}
    schema = {"NativeDiTX": {"inputs": [width, name], "outputs": ["LATENT"], "output_node": False}}
    return [copy.deepcopy(schema), copy.deepcopy(schema)]


def locale(language: str) -> dict[str, Any]:
    return json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))


def keys(texts: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Every text by its path of keys."""
    if isinstance(texts, str):
        return {path: texts}
    return {key: text for name, inner in texts.items() for key, text in keys(inner, (*path, name)).items()}
