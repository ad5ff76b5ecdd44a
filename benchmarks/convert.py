"""Convert a large model and copy the same bytes: time and peak memory of each, in processes of their own.

    python benchmarks/convert.py [--gb 3.6] [--folder DIR]

Both write a new file and wait until it is on disk. The model has FLUX.1's layers, so q, k and v are joined on the way.
Target: within 1.5 times the copy, memory flat. Measured on two cores, 3.3 GB: 0.67 times (3.2 s and 4.7 s), 0 MB added.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN = 3072
DOUBLE = 340_000_000  # parameters of a double block, about


def write_model(folder: Path, gigabytes: float) -> Path:
    """A diffusers folder of about that size, bfloat16, random bytes."""
    from nativedit.files.writer import SafetensorsWriter

    single = 19 * HIDDEN * HIDDEN
    doubles = max(1, round(gigabytes * 1e9 / 2 * 0.6 / DOUBLE))
    singles = max(1, round((gigabytes * 1e9 / 2 - doubles * DOUBLE) / single))
    entries = [(name, "BF16", shape) for name, shape in _shapes(doubles, singles).items()]
    folder.mkdir(parents=True, exist_ok=True)
    with SafetensorsWriter(folder / "diffusion_pytorch_model.safetensors", entries) as writer:
        for name, _, shape in entries:
            writer.write_bytes(name, _bytes(2 * math.prod(shape)))
    (folder / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    return folder


def _bytes(size: int) -> bytes:
    block = os.urandom(min(size, 1 << 20))
    return (block * (size // len(block) + 1))[:size]


def _shapes(doubles: int, singles: int) -> dict[str, tuple[int, ...]]:
    h = HIDDEN
    layers = {
        "x_embedder": (h, 64),
        "context_embedder": (h, 4096),
        "time_text_embed.timestep_embedder.linear_1": (h, 256),
        "time_text_embed.timestep_embedder.linear_2": (h, h),
        "time_text_embed.text_embedder.linear_1": (h, 768),
        "time_text_embed.text_embedder.linear_2": (h, h),
        "norm_out.linear": (2 * h, h),
        "proj_out": (64, h),
    }
    norms = {}
    for i in range(doubles):
        start = f"transformer_blocks.{i}."
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            layers[f"{start}attn.{name}"] = (h, h)
        for name in ("ff", "ff_context"):
            layers[f"{start}{name}.net.0.proj"], layers[f"{start}{name}.net.2"] = (4 * h, h), (h, 4 * h)
        layers[start + "norm1.linear"] = layers[start + "norm1_context.linear"] = (6 * h, h)
        norms |= {f"{start}attn.norm_{name}.weight": (128,) for name in ("q", "k", "added_q", "added_k")}
    for i in range(singles):
        start = f"single_transformer_blocks.{i}."
        layers |= {f"{start}attn.{name}": (h, h) for name in ("to_q", "to_k", "to_v")}
        layers[start + "proj_mlp"], layers[start + "proj_out"] = (4 * h, h), (h, 5 * h)
        layers[start + "norm.linear"] = (3 * h, h)
        norms |= {f"{start}attn.norm_{name}.weight": (128,) for name in "qk"}
    shapes = {f"{name}.weight": shape for name, shape in layers.items()}
    return shapes | {f"{name}.bias": shape[:1] for name, shape in layers.items()} | norms


def copy(source: str, destination: str) -> None:
    with open(source, "rb") as read, open(destination, "wb") as write:
        while block := read.read(16 << 20):
            write.write(block)
        write.flush()
        os.fsync(write.fileno())


def convert(source: str, destination: str) -> None:
    from nativedit.checkpoints.convert import convert as run

    run(source, destination)


def measured(what: str, source: Path, destination: Path) -> dict[str, float]:
    """Seconds and peak memory (MB) of ``what`` in a process of its own; the disk's cache is warm in both cases."""
    destination.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--only", what, str(source), str(destination)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def run_one(what: str, source: str, destination: str) -> None:
    if what == "convert":
        import nativedit.checkpoints.convert  # noqa: F401 - imports are not what is measured
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    start = time.monotonic()
    {"copy": copy, "convert": convert}[what](source, destination)
    seconds = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(json.dumps({"seconds": seconds, "peak": peak, "added": peak - idle}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=3.6)
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        run_one(*args.only)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        model = write_model(folder / "model", args.gb)
        file = model / "diffusion_pytorch_model.safetensors"
        print(f"{file.stat().st_size / 1e9:.2f} GB, bfloat16")
        rounds: dict[str, list[dict[str, float]]] = {"copy": [], "convert": []}
        for _ in range(args.rounds):
            # In turn, so that what else the machine does falls on both; one file at a time, so that it fits the cache.
            for what, source in (("copy", file), ("convert", model)):
                rounds[what].append(measured(what, source, folder / "out.safetensors"))
                (folder / "out.safetensors").unlink()
        best = {what: min(one["seconds"] for one in found) for what, found in rounds.items()}
        added = max(one["added"] for one in rounds["convert"])
        pairs = zip(rounds["convert"], rounds["copy"], strict=True)
        ratios = ", ".join(f"{ours['seconds'] / plain['seconds']:.2f}" for ours, plain in pairs)
        print(f"copy     {best['copy']:6.2f} s")
        print(f"convert  {best['convert']:6.2f} s, {best['convert'] / best['copy']:.2f} times ({ratios} side by side)")
        print(f"convert adds {added:.0f} MB of memory")


if __name__ == "__main__":
    main()
