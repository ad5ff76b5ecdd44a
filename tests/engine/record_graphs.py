"""Records what a real ComfyUI samples for GRAPHS, so that the engine can be compared with it where there is none.

cd tests && python engine/record_graphs.py            # the ComfyUI that the tests find
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).parent.parent


def latents_of(comfyui: Path, python: Path, folder: Path) -> dict[str, torch.Tensor]:
    """name -> latent, from a ComfyUI that is started for it with the pack and the tiny models in ``folder``."""
    import comfyui_files as files
    import prx_files
    from comfyui_server import Server, make_base
    from graphs import GRAPHS

    base = make_base(folder)
    files.write_models(base / "models")
    prx_files.write(base / "models")
    files.write_loras(base / "models" / "loras")
    found = {}
    with Server(comfyui, base, python) as server:
        for name, graph in GRAPHS.items():
            (entry,) = server.run(graph)["save"]["latents"]
            found[name] = files.tensors(server.file_of(entry))["latent_tensor"]
    return found


def main() -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "engine")]
    from comfyui_server import version_of
    from comfyui_support import comfyui_python, find_comfyui
    from safetensors.torch import save_file

    comfyui = find_comfyui()
    if comfyui is None:
        sys.exit("no ComfyUI found; set COMFYUI_PATH")
    with tempfile.TemporaryDirectory() as folder:
        latents = latents_of(comfyui, comfyui_python(comfyui), Path(folder) / "base")
    target = TESTS / "data" / "recorded" / f"graphs_comfyui_{version_of(comfyui)}.safetensors"
    save_file(latents, target)
    print(target)


if __name__ == "__main__":
    main()
