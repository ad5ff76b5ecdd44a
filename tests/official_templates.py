"""What ComfyUI's official workflow templates (PyPI: comfyui-workflow-templates-json) name: recorded facts, no workflow.

    cd tests && ../.venv/bin/python official_templates.py --record

with the package installed writes data/official_templates.json: its version, counts, the addresses of every file that a
card of core's models names, and the files of a few templates.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import DATA

PACKAGE = "comfyui-workflow-templates-json"
RECORDED = DATA / "official_templates.json"
SAMPLES = (
    "flux_dev_full_text_to_image",
    "image_chroma_text_to_image",
    "image_ernie_image",
    "image_flux2",
    "image_krea2_turbo_t2i",
    "image_netayume_lumina_t2i",
    "image_qwen_image",
    "image_z_image_turbo",
    "sd3.5_simple_example",
    "video_wan2_2_14B_t2v",
)


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def version() -> str | None:
    """Of the installed package, None without one."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def templates() -> dict[str, Path]:
    """Name -> file of every workflow in the package; the lists of templates beside them are none."""
    import comfyui_workflow_templates_json as package

    files = sorted((Path(package.__file__).parent / "templates").glob("*.json"))
    return {file.stem: file for file in files if "nodes" in read(file)}


def read(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def named(value: Any) -> Iterator[dict[str, Any]]:
    """Every {"name", "url", "directory"} in a list called ``models``, wherever it is."""
    if isinstance(value, dict):
        models = value.get("models")
        yield from (entry for entry in models if "name" in entry and "url" in entry) if isinstance(models, list) else ()
        for inner in value.values():
            yield from named(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from named(inner)


def carded() -> list[str]:
    from nativedit.supported_models import architectures

    core = [card for card in architectures() if card.module is None]
    return sorted({name for card in core for names in card.files.values() for name in names})


def summary() -> dict[str, Any]:
    places: dict[str, set[tuple[str, str]]] = {name: set() for name in carded()}
    files, with_files, samples = set(), 0, {}
    found = templates()
    for name, file in found.items():
        entries = [(entry["name"], entry["directory"], entry["url"].split("?")[0]) for entry in named(read(file))]
        files |= {entry[0] for entry in entries}
        with_files += bool(entries)
        for model, folder, url in entries:
            if model in places:
                places[model].add((folder, url))
        if name in SAMPLES:
            samples[name] = sorted({entry[0] for entry in entries})
    return {
        "package": PACKAGE,
        "version": version(),
        "workflows": len(found),
        "that name files": with_files,
        "files": len(files),
        "addresses": {name: sorted(map(list, entries)) for name, entries in places.items()},
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", required=True)
    parser.parse_args()
    RECORDED.write_text(json.dumps(summary(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
