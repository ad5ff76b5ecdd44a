"""Quantizing to int8_convrot while a file is loaded, against ComfyUI loading the file as it is: time and memory.

    python benchmarks/quantize_on_load.py [--gb 1.5] [--rounds 2] [--format int8_convrot] [--folder DIR]

In the ComfyUI that the tests find, on the CPU; each load is a process of its own, the disk's cache is warm. Core's load
is made complete by reading every weight once: it maps the file and has read nothing when it returns. The work of
quantization itself is measured beside it: the same plan on weights that lie in memory already. Target: what our load
takes beyond that work is at most twice core's load; anonymous memory peaks below the result plus 1 GiB.
Measured on two cores, 1 GiB of bfloat16, ComfyUI 0.33: 0.70 times beyond that work (2.9 s in all, of which 2.3 s are
quantization; core's load 0.9 s), peak 519 MiB above the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

from comfyui_server import version_of  # noqa: E402
from comfyui_support import comfyui_python, find_comfyui  # noqa: E402

INSIDE = """
import gc, importlib, importlib.util, json, os, sys, threading, time
comfyui, pack, what, file, precision = sys.argv[1:]
sys.argv = ["main.py", "--cpu"]
sys.path.insert(0, comfyui)
import comfy.options
comfy.options.enable_args_parsing()
import torch, comfy.sd, comfy.quant_ops, comfy_api.latest, folder_paths, nodes
name = pack.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, pack + "/__init__.py")
package = importlib.util.module_from_spec(spec)
sys.modules[name] = package
spec.loader.exec_module(package)
import asyncio
asyncio.run(package.comfy_entrypoint())
quantize = importlib.import_module(name + ".bridge.quantize")
transform = importlib.import_module(name + ".checkpoints.transform")
memory = importlib.import_module(name + ".files.memory")
from safetensors.torch import load_file

def anonymous():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) / 1024

peak, done = 0.0, threading.Event()
def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())

def core():
    patcher = comfy.sd.load_diffusion_model(file)
    for value in patcher.model.state_dict().values():
        value.view(torch.uint8).reshape(-1)[::4096].sum()
    return patcher

def ours():
    return quantize.load_quantized(file, None, precision, "card")

def work():
    source = memory.TensorSource("memory", held)
    plan = transform.plan(source, precision, device=torch.device("cpu"), detect=quantize.DetectedAs())
    return plan.tensors()

held = {key: value.clone() for key, value in load_file(file).items()} if what == "work" else {}
gc.collect()
idle = anonymous()
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
result = {"core": core, "ours": ours, "work": work}[what]()
seconds = time.perf_counter() - start
done.set()
state = result if what == "work" else result.model.diffusion_model.state_dict()
size = sum(value.numel() * value.element_size() for value in state.values()) / 2**20
print(json.dumps({"seconds": seconds, "added": max(peak, anonymous()) - idle, "size": size}))
"""


def write_model(path: Path, gigabytes: float, width: int) -> None:
    """FLUX.1's layers, one double block and as many single ones as fit; random bfloat16 weights."""
    import torch

    from nativedit.files.writer import SafetensorsWriter

    entries = [(name, "BF16", shape) for name, shape in _shapes(gigabytes, width).items()]
    block = torch.randn(1 << 20).mul(0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with SafetensorsWriter(path, entries) as writer:
        for name, _, shape in entries:
            size = 2 * math.prod(shape)
            writer.write_bytes(name, (block * (size // len(block) + 1))[:size])


def _shapes(gigabytes: float, h: int) -> dict[str, tuple[int, ...]]:
    layers = {"img_in": (h, 64), "txt_in": (h, 4096), "final_layer.linear": (64, h)}
    layers["final_layer.adaLN_modulation.1"] = (2 * h, h)
    for name, inputs in (("time_in", 256), ("vector_in", 768)):
        layers[f"{name}.in_layer"], layers[f"{name}.out_layer"] = (h, inputs), (h, h)
    norms = {}
    for stream in ("img", "txt"):
        start = f"double_blocks.0.{stream}_"
        layers |= {f"{start}mod.lin": (6 * h, h), f"{start}attn.qkv": (3 * h, h), f"{start}attn.proj": (h, h)}
        layers |= {f"{start}mlp.0": (4 * h, h), f"{start}mlp.2": (h, 4 * h)}
        norms |= {f"{start}attn.norm.{name}_norm.scale": (128,) for name in ("query", "key")}
    singles = max(1, round((gigabytes * 5e8 - sum(map(math.prod, layers.values()))) / (15 * h * h)))
    for index in range(singles):
        start = f"single_blocks.{index}."
        layers |= {f"{start}linear1": (7 * h, h), f"{start}linear2": (h, 5 * h), f"{start}modulation.lin": (3 * h, h)}
        norms |= {f"{start}norm.{name}_norm.scale": (128,) for name in ("query", "key")}
    weights = {f"{name}.weight": shape for name, shape in layers.items()}
    return weights | {f"{name}.bias": shape[:1] for name, shape in layers.items()} | norms


def measured(comfyui: Path, what: str, file: Path, precision: str) -> dict[str, float]:
    command = [os.fspath(comfyui_python(comfyui)), "-c", INSIDE, comfyui, ROOT, what, file, precision]
    done = subprocess.run(command, cwd=comfyui, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.5)
    parser.add_argument("--width", type=int, default=3072, help="of the model's stream, a multiple of 256")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--format", default="int8_convrot")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    args = parser.parse_args()
    comfyui = find_comfyui()
    if comfyui is None:
        sys.exit("no ComfyUI found; set COMFYUI_PATH")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        file = Path(name) / "model.safetensors"
        write_model(file, args.gb, args.width)
        print(f"ComfyUI {version_of(comfyui)}, {file.stat().st_size / 2**20:.0f} MiB of bfloat16 to {args.format}")
        runs: dict[str, list[dict[str, float]]] = {"core": [], "ours": [], "work": []}
        for _ in range(args.rounds):
            for what, into in runs.items():
                into.append(measured(comfyui, what, file, args.format))
    seconds = {what: statistics.median(run["seconds"] for run in into) for what, into in runs.items()}
    for what, title in (("core", "core, as stored"), ("ours", "ours, quantized"), ("work", "quantization alone")):
        added = max(run["added"] for run in runs[what])
        size = runs[what][0]["size"]
        print(f"{title:<19} {seconds[what]:6.2f} s   peak {added:6.0f} MiB of anonymous memory, result {size:6.0f} MiB")
    beyond = (seconds["ours"] - seconds["work"]) / seconds["core"]
    print(f"whole load: {seconds['ours'] / seconds['core']:.2f} times core's; beyond quantization: {beyond:.2f} times")
    over = max(run["added"] for run in runs["ours"]) - runs["ours"][0]["size"]
    print(f"peak beyond the result: {over:.0f} MiB")


if __name__ == "__main__":
    main()
