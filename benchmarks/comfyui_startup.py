"""What the pack adds to ComfyUI's start: importing it, registering, and its nodes' schemas, with ComfyUI itself loaded.

    python benchmarks/comfyui_startup.py [--runs 5]

Each run is a process of its own on the interpreter and the ComfyUI that the tests find. Target: below 0.3 s.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from comfyui_server import version_of  # noqa: E402
from comfyui_support import comfyui_python, find_comfyui  # noqa: E402

INSIDE = """
import asyncio, importlib.util, sys, time
comfyui, pack = sys.argv[1:]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, comfyui)
import comfy.options
comfy.options.enable_args_parsing()
import comfy.sd, comfy_api.latest, folder_paths, nodes
start, busy = time.perf_counter(), time.process_time()
name = pack.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, pack + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
for node in asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list()):
    node.GET_SCHEMA()
print(time.perf_counter() - start, time.process_time() - busy)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    comfyui = find_comfyui()
    if comfyui is None:
        sys.exit("no ComfyUI found; set COMFYUI_PATH")
    command = [comfyui_python(comfyui), "-c", INSIDE, comfyui, ROOT]
    seconds = []
    for _ in range(runs):
        done = subprocess.run(command, cwd=comfyui, capture_output=True, text=True, check=True)
        seconds.append(float(done.stdout.split()[-1]))
    print(
        f"ComfyUI {version_of(comfyui)}: median {statistics.median(seconds):.3f} s of {runs}, best {min(seconds):.3f} s"
    )


if __name__ == "__main__":
    main()
