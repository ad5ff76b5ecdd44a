"""Writes tests/data/recorded anew from the ComfyUIs on this machine: run it when a test says that a recording is stale.

    python scripts/record_comfyui.py [COMFYUI_FOLDER ...]

Without folders: the one that the tests find, and those of $NATIVEDIT_COMFYUI_ALL. Per version: signatures of ComfyUI's
names and nodes that the pack uses (comfyui-<version>.json). From the newest also: sigmas and latents.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

from comfyui_recording import record, recording_file  # noqa: E402
from comfyui_server import Server, comfyuis, make_base, python_for, version_of  # noqa: E402
from comfyui_support import find_comfyui  # noqa: E402


def main(named: list[str]) -> None:
    default = find_comfyui()
    folders = [Path(name).resolve() for name in named] or comfyuis(default)
    if not folders:
        sys.exit("no ComfyUI found; name its folder, or set COMFYUI_PATH")
    for comfyui in folders:
        python = python_for(comfyui, default or comfyui)
        with (
            tempfile.TemporaryDirectory() as folder,
            Server(comfyui, make_base(Path(folder) / "base"), python) as server,
        ):
            recorded = record(server)
        target = recording_file(version_of(comfyui))
        target.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(target)
    newest = max(folders, key=lambda folder: tuple(map(int, version_of(folder).split("."))))
    sampled = target.parent / f"sampling_comfyui_{version_of(newest)}.safetensors"
    script = TESTS / "engine" / "record_sampling.py"
    subprocess.run([python_for(newest, default or newest), script, newest, sampled], check=True)
    subprocess.run([sys.executable, TESTS / "engine" / "record_graphs.py"], cwd=TESTS, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
