"""Where a real ComfyUI is, and which Python runs it. Imports nothing of ComfyUI."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent


class NotComfyUI(Exception):
    """$COMFYUI_PATH names a folder that holds no ComfyUI."""


def is_comfyui(folder: Path) -> bool:
    return (folder / "nodes.py").is_file() and (folder / "comfy" / "ldm").is_dir()


def find_comfyui(environ: Mapping[str, str] | None = None, pack: Path = ROOT, home: Path | None = None) -> Path | None:
    """The ComfyUI to judge the pack in: $COMFYUI_PATH, the one whose custom_nodes/ holds the pack, ~/comfy/ComfyUI.

    None where there is none. NotComfyUI when $COMFYUI_PATH is set to something else: whoever sets it means it.
    """
    environ = os.environ if environ is None else environ
    if named := environ.get("COMFYUI_PATH"):
        folder = Path(named).expanduser()
        if not is_comfyui(folder):
            raise NotComfyUI(
                f"COMFYUI_PATH is {named}, which holds no ComfyUI (nodes.py and comfy/ are expected there); "
                "name ComfyUI's own folder, or unset COMFYUI_PATH"
            )
        return folder.absolute()
    # Not resolved: a pack that is linked into custom_nodes/ belongs to that ComfyUI.
    pack = Path(os.path.abspath(pack))
    if pack.parent.name == "custom_nodes" and is_comfyui(pack.parent.parent):
        return pack.parent.parent
    usual = (Path.home() if home is None else home) / "comfy" / "ComfyUI"
    return usual if is_comfyui(usual) else None


def comfyui_python(comfyui: Path, environ: Mapping[str, str] | None = None) -> Path:
    """The interpreter with that ComfyUI's packages: $COMFYUI_PYTHON, its own environment, else the one running."""
    environ = os.environ if environ is None else environ
    if named := environ.get("COMFYUI_PYTHON"):
        return Path(named).expanduser()
    candidates = [comfyui / env / "bin" / "python" for env in (".venv", "venv")]
    candidates += [comfyui / env / "Scripts" / "python.exe" for env in (".venv", "venv")]
    candidates.append(comfyui.parent / "python_embeded" / "python.exe")
    return next((python for python in candidates if python.exists()), Path(sys.executable))
