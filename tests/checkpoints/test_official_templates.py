"""ComfyUI's official workflow templates: `resolve --workflow` lists the files of every one; cards name theirs there.

The package is not needed: what it says is recorded (official_templates.py). With it every template is read.
"""

from __future__ import annotations

import json
from pathlib import Path

import official_templates
import pytest
from official_templates import named, read, recorded

from nativedit.checkpoints.workflow_files import MISSING, PRESENT, check_workflow, model_files
from nativedit.supported_models import architectures

with_package = pytest.mark.skipif(
    official_templates.version() is None, reason=f"needs the package {official_templates.PACKAGE}"
)


def test_cards_of_core_models_have_the_names_folders_and_addresses_of_the_templates():
    known = recorded()["addresses"]
    for card in architectures():
        if card.module is not None:
            continue
        for folder, names in card.files.items():
            for name in names:
                assert [folder, card.downloads[name]] in known[name], (card.name, name)


def test_every_one_of_the_ten_cards_has_files():
    wanted = ("z_image", "qwen_image", "flux", "flux2", "chroma", "wan", "krea2", "ernie_image", "lumina2", "sd3")
    cards = {card.name: card for card in architectures()}
    assert [name for name in wanted if not cards[name].files] == []


@pytest.mark.parametrize("name", official_templates.SAMPLES)
def test_a_workflow_with_a_templates_files_lists_them(name, tmp_path: Path):
    """Of the recorded names a workflow is made, in the editor's form: each file in a node of a subgraph."""
    files = recorded()["samples"][name]
    nodes = [{"type": "Loader", "properties": {"models": [{"name": n, "url": "https://x/" + n}]}} for n in files]
    workflow = {"nodes": [{"type": "id"}], "definitions": {"subgraphs": [{"id": "id", "nodes": nodes}]}}
    (tmp_path / "w.json").write_text(json.dumps(workflow))
    (tmp_path / "models").mkdir()

    answers = check_workflow(tmp_path / "w.json", models_dir=tmp_path / "models")

    assert files and sorted(answer.wanted.name for answer in answers) == files
    assert all(answer.state == MISSING and answer.url for answer in answers)


@with_package
def test_every_official_template_lists_all_its_files():
    files = set()
    for name, file in official_templates.templates().items():
        workflow = read(file)
        listed = {wanted.name.rpartition("/")[2]: wanted for wanted in model_files(workflow)}
        for entry in named(workflow):
            wanted = listed[entry["name"].strip().rpartition("/")[2]]
            assert wanted.url and wanted.folder, (name, entry["name"])
        files |= listed.keys()
    assert len(files) >= 300


@with_package
def test_the_command_answers_every_official_template(tmp_path: Path):
    models = tmp_path / "models"
    (models / "vae").mkdir(parents=True)
    (models / "vae/ae.safetensors").write_bytes(b"")
    states = set()
    for file in official_templates.templates().values():
        for answer in check_workflow(file, models_dir=models):
            assert (answer.state == PRESENT) == (answer.wanted.name == "ae.safetensors")
            states.add(answer.state)
    assert states == {PRESENT, MISSING}


@with_package
def test_the_recording_is_what_this_version_of_the_package_says():
    if official_templates.version() != recorded()["version"]:
        pytest.skip(f"another version than the recorded {recorded()['version']}")
    assert official_templates.summary() == recorded()
