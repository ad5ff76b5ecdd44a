"""The pack against what was recorded of each supported ComfyUI; the tests marked `comfyui` say when that is stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comfyui_names import used_names
from comfyui_recording import nodes_we_rely_on, recordings

SUPPORTED = {"0.8.0", "0.29.0", "0.33.0"}


def test_every_supported_comfyui_is_recorded():
    assert recordings().keys() >= SUPPORTED


@pytest.mark.parametrize("version", sorted(recordings()))
def test_every_name_of_comfyui_that_the_pack_uses_exists_in_the_recording(root: Path, version: str):
    signatures = recordings()[version]["signatures"]

    missing = [name for name in used_names(root) if signatures.get(name) is None and not _new_method(name, signatures)]

    assert missing == []


def _new_method(name: str, signatures: dict[str, str | None]) -> bool:
    """A method of ours on a class of ComfyUI's which that class itself lacks (ComfyUI asks its subclasses for it)."""
    owner = name.rpartition(".")[0]
    return name in signatures and str(signatures.get(owner)).startswith("class")


@pytest.mark.parametrize("version", sorted(recordings()))
def test_the_engines_nodes_have_the_inputs_and_outputs_of_comfyuis(version: str):
    from nativedit.engine.declare import _no_files, node_classes

    recorded = recordings()[version]["nodes"]
    with _no_files():
        schemas = {name: cls.define_schema() for name, cls in node_classes().items() if name in recorded}
    differences = {}
    for name, ours in schemas.items():
        inputs = {entry.id: entry for entry in ours.inputs}
        differences[name] = _differences(recorded[name], inputs, [output.io_type for output in ours.outputs])

    assert {name: found for name, found in differences.items() if found} == {}


def _differences(recorded: dict[str, Any], inputs: dict[str, Any], outputs: list[str]) -> list[str]:
    required = recorded["inputs"].get("required", {})
    known = {**required, **recorded["inputs"].get("optional", {})}
    found = [f"lacks {name}" for name in required if name not in inputs]
    found += [f"invented {name}" for name in inputs if name not in known]
    for name, kind in known.items():
        # A choice may be read as free text: the engine then takes more than ComfyUI.
        fitting = {kind, "STRING"} if kind == "COMBO" else set(kind.split(","))
        if name in inputs and inputs[name].io_type not in fitting:
            found.append(f"{name} is {inputs[name].io_type}, not {kind}")
    # Save nodes have an output in some versions and none in others; those that both have must be the same.
    if any(ours != theirs for ours, theirs in zip(outputs, recorded["outputs"], strict=False)):
        found.append(f"outputs {outputs}, not {recorded['outputs']}")
    return found


def test_the_names_include_wrapped_functions_and_overridden_methods(root: Path):
    names = used_names(root)

    assert {
        "comfy.model_detection.detect_unet_config",
        "comfy.sd.load_text_encoder_state_dicts",
        "comfy.model_base.BaseModel.extra_conds",
        "comfy.supported_models_base.BASE.get_model",
        "comfy_api.latest.ComfyExtension",
    } <= set(names)
    assert nodes_we_rely_on()
