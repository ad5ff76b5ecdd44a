"""What is recorded of each supported ComfyUI, so that the pack can be held against it where there is none."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from comfyui_names import used_names
from comfyui_server import Server, environment, version_of
from support import DATA, ROOT

SIGNATURES = Path(__file__).parent / "comfyui" / "signatures.py"


def recording_file(version: str) -> Path:
    return DATA / "recorded" / f"comfyui-{version}.json"


def recordings() -> dict[str, dict[str, Any]]:
    """version -> recording."""
    found = sorted((DATA / "recorded").glob("comfyui-*.json"))
    return {file.stem.removeprefix("comfyui-"): json.loads(file.read_text(encoding="utf-8")) for file in found}


def nodes_we_rely_on() -> list[str]:
    """ComfyUI's nodes that the engine implements or an example workflow uses."""
    from nativedit.engine.declare import node_classes

    names = set(node_classes())
    for file in sorted((ROOT / "example_workflows" / "api").glob("*.json")):
        names |= {node["class_type"] for node in json.loads(file.read_text(encoding="utf-8")).values()}
    return sorted(name for name in names if not name.startswith("NativeDiT"))


def signatures(comfyui: Path, python: Path, names: list[str]) -> dict[str, str | None]:
    """name -> its parameters, None where this ComfyUI has no such name."""
    run = subprocess.run(
        [os.fspath(python), os.fspath(SIGNATURES), os.fspath(comfyui)],
        cwd=comfyui,
        input=json.dumps(names),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    if run.returncode:
        raise RuntimeError(run.stderr[-4000:])
    return json.loads(run.stdout)


def schema(info: dict[str, Any]) -> dict[str, Any]:
    """What of a node's /object_info a graph depends on: names and types of inputs, and the types of outputs."""
    inputs = {
        kind: {name: "COMBO" if isinstance(spec[0], list) else spec[0] for name, spec in group.items()}
        for kind, group in info["input"].items()
        if kind in ("required", "optional")
    }
    return {"inputs": inputs, "outputs": ["COMBO" if isinstance(kind, list) else kind for kind in info["output"]]}


def record(server: Server) -> dict[str, Any]:
    info = server.get_json("/object_info")
    return {
        "version": version_of(server.comfyui),
        "signatures": signatures(server.comfyui, server.python, used_names(ROOT)),
        "nodes": {name: schema(info[name]) for name in nodes_we_rely_on() if name in info},
    }
