"""What a saved workflow relies on: the schemas of our nodes, read outside ComfyUI, and which changes would break it.

    cd tests && ../.venv/bin/python node_schemas.py --record

writes the schemas as they are now to data/node_schemas.json and their texts to locales/en/nodeDefs.json, and refuses
when a workflow saved with the recorded schemas would no longer load.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
RECORDED = TESTS / "data" / "node_schemas.json"
LOCALES = TESTS.parent / "locales"


class ListedFiles:
    """A host that names what it was asked for in place of the files, which differ from machine to machine."""

    name = "recording"

    def list_files(self, folder: str) -> list[str]:
        return [f"<{folder}>"]

    def list_statistics(self) -> list[str]:
        return ["<statistics>"]

    def list_model_folders(self) -> list[str]:
        return ["<folders>"]

    def samplers(self) -> list[str]:
        return ["<samplers>"]

    def schedulers(self) -> list[str]:
        return ["<schedulers>"]


def node_classes() -> list[type]:
    import nativedit.nodes

    return nativedit.nodes.NODES


def schemas() -> dict[str, Any]:
    """node id -> the schema object, with ListedFiles for files."""
    from nativedit import host

    before = host._current
    host.set_host(ListedFiles())
    try:
        found = [node.define_schema() for node in node_classes()]
    finally:
        host.set_host(before)
    return {schema.node_id: schema for schema in found}


def described(schema: Any) -> dict[str, Any]:
    """The part of a schema that a workflow file or an API prompt refers to."""
    return {
        "inputs": [
            {"id": item.id, "type": item.io_type, "optional": bool(item.optional)}
            | {
                key: getattr(item, key)
                for key in ("default", "min", "max", "options")
                if getattr(item, key, None) is not None
            }
            for item in schema.inputs
        ],
        "outputs": [item.io_type for item in schema.outputs],
        "output_node": schema.is_output_node,
    }


def breaks(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Why workflows saved with the schemas `old` would not load with `new`."""
    problems = [f"{node} is gone" for node in old if node not in new]
    for node in old.keys() & new.keys():
        before, now = old[node]["inputs"], new[node]["inputs"]
        # A workflow file keeps widget values by position, so what was first must stay first.
        if [item["id"] for item in now[: len(before)]] != [item["id"] for item in before]:
            problems.append(f"{node}: inputs were renamed, removed or moved; add new ones at the end")
            continue
        problems += [
            f"{node}.{item['id']}: a new input must be optional or have a default"
            for item in now[len(before) :]
            if not item["optional"] and "default" not in item
        ]
        for was, item in zip(before, now, strict=False):
            problems += [f"{node}.{item['id']}: {problem}" for problem in _narrower(was, item)]
        if new[node]["outputs"][: len(old[node]["outputs"])] != old[node]["outputs"]:
            problems.append(f"{node}: outputs were changed, removed or moved")
    return sorted(problems)


def _narrower(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    problems = []
    if now["type"] != was["type"]:
        problems.append(f"was {was['type']} and is {now['type']}")
    if was["optional"] and not now["optional"] and "default" not in now:
        problems.append("was optional and is required")
    if gone := [option for option in was.get("options", []) if option not in now.get("options", [])]:
        problems.append(f"choices are gone: {gone}")
    if "min" in now and now["min"] > was.get("min", now["min"]):
        problems.append(f"the minimum rose to {now['min']}")
    if "max" in now and now["max"] < was.get("max", now["max"]):
        problems.append(f"the maximum fell to {now['max']}")
    return problems


def english(schema: Any) -> dict[str, Any]:
    """One node's entry of locales/en/nodeDefs.json."""
    return {
        "display_name": schema.display_name,
        "description": schema.description,
        "inputs": {item.id: {"name": item.display_name or item.id, "tooltip": item.tooltip} for item in schema.inputs},
        "outputs": {
            str(index): {"name": item.display_name or item.io_type, "tooltip": item.tooltip}
            for index, item in enumerate(schema.outputs)
        },
    }


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", required=True)
    parser.parse_args()
    now = {node: described(schema) for node, schema in schemas().items()}
    if RECORDED.exists() and (problems := breaks(json.loads(RECORDED.read_text(encoding="utf-8")), now)):
        sys.exit("workflows saved before would no longer load:\n  " + "\n  ".join(problems))
    _write(RECORDED, now)
    _write(LOCALES / "en" / "nodeDefs.json", {node: english(schema) for node, schema in schemas().items()})


if __name__ == "__main__":
    main()
