"""Rate and memory of every format from file to file, beside comfy-kitchen in memory and the plain reading and writing.

    python benchmarks/quant_speed.py [--gigabytes 3.6] [--formats int8_convrot ...] [--device cpu] [--folder DIR]

The model has the matrices of a DiT: blocks of attention [3D, D], [D, D] and MLP [4D, D], [D, 4D] with D = 3072 in
bfloat16. "kitchen" quantizes the same weights, already in memory, with comfy-kitchen's own call: no file at all.
"read" reads the file's bytes once, "write" writes and syncs as many bytes as the result has, "copy" is both for the
whole source. Ours should take no longer than kitchen + read + write, whatever it overlaps.

Each format runs in a process of its own; memory is the peak of the process's own pages (not the page cache) over what
importing torch and comfy-kitchen takes. With --folder the model is made once and kept there, so that formats can be
measured one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nativedit.files import SafetensorsWriter, open_source
from nativedit.quant.formats import FORMATS, Recipe, parse_recipe
from nativedit.quant.kitchen import layout_of

WIDTH = 3072
SHAPES = (
    ("attn.qkv", (3 * WIDTH, WIDTH)),
    ("attn.proj", (WIDTH, WIDTH)),
    ("mlp.up", (4 * WIDTH, WIDTH)),
    ("mlp.down", (WIDTH, 4 * WIDTH)),
)
BLOCK_BYTES = 2 * sum(rows * columns for _, (rows, columns) in SHAPES)
PIECE = 64 << 20


def make_model(path: Path, gigabytes: float) -> None:
    blocks = max(2, round(gigabytes * 1e9 / BLOCK_BYTES))
    entries = [(f"blocks.{index}.{name}.weight", "BF16", shape) for index in range(blocks) for name, shape in SHAPES]
    noise = torch.randn(WIDTH, 4 * WIDTH, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    with SafetensorsWriter(path, entries) as writer:
        for name, _, (rows, columns) in entries:
            for start in range(0, rows, WIDTH):
                writer.write_rows(name, start, noise[:, :columns].contiguous())


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def seconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def read_all(path: Path) -> None:
    buffer = bytearray(PIECE)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def write_all(path: Path, count: int) -> None:
    data = os.urandom(PIECE)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, count, PIECE):
            file.write(data[: min(PIECE, count - start)])
        os.fsync(file.fileno())
    path.unlink()


def kitchens(weight: torch.Tensor, recipe: Recipe) -> None:
    """comfy-kitchen's own call on a whole weight."""
    keywords: dict[str, Any] = {}
    if recipe.format.startswith("float8"):
        keywords["dtype"] = getattr(torch, recipe.format)
    elif recipe.format == "int8_tensorwise":
        keywords["per_channel"] = recipe.row_scales
        if recipe.convrot_groupsize:
            keywords.update(convrot=True, convrot_groupsize=recipe.convrot_groupsize)
    elif recipe.format == "convrot_w4a4":
        keywords["convrot_groupsize"] = recipe.convrot_groupsize
    elif recipe.format == "asym_w4a8_int8":
        keywords.update(group_size=recipe.group_size, convrot_groupsize=recipe.convrot_groupsize, codebook=True)
    layout_of(recipe.format).quantize(weight, **keywords)


def kitchen_seconds(source: Path, recipe: Recipe, device: str) -> float:
    """One block's weights, then scaled to the whole model."""
    with open_source(source) as opened:
        total = sum(info.nbytes for info in opened.tensors.values())
        sample = [opened.read(name).to(device) for name in opened if name.startswith("blocks.0.")]
    kitchens(sample[1], recipe)

    def block() -> None:
        for weight in sample:
            kitchens(weight, recipe)
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    return seconds(block) * total / sum(weight.nbytes for weight in sample)


def one(source: Path, target: Path, name: str, device: str) -> dict[str, float]:
    from nativedit.quant.convert import quantize

    recipe = parse_recipe(name)
    layout_of(recipe.format)
    base, peak = anonymous_bytes(), [0]

    def progress(done: int, total: int, label: str) -> None:
        peak[0] = max(peak[0], anonymous_bytes())

    read = seconds(lambda: read_all(source))
    ours = seconds(lambda: quantize(source, target, format=recipe, device=device, progress=progress))
    size = target.stat().st_size
    target.unlink()
    write = seconds(lambda: write_all(target, size))
    kitchen = kitchen_seconds(source, recipe, device)
    expected = kitchen + read + write
    return {
        "ours_s": ours,
        "kitchen_s": kitchen,
        "read_s": read,
        "write_s": write,
        "expected_s": expected,
        "ratio": ours / expected,
        "gb_per_s": source.stat().st_size / 1e9 / ours,
        "peak_mb": (peak[0] - base) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.6)
    parser.add_argument("--formats", nargs="+", default=[*FORMATS, "int8_convrot"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="keep the model here for the next run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        source, target, recipe = arguments.one
        print(json.dumps(one(Path(source), Path(target), recipe, arguments.device)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source = Path(arguments.folder or folder) / f"model_{arguments.gigabytes:g}GB.safetensors"
        target = Path(folder) / "out.safetensors"
        if not source.exists():
            make_model(source, arguments.gigabytes)
        size = source.stat().st_size
        copied = seconds(lambda: (read_all(source), write_all(target, size)))
        rows = []
        for recipe in arguments.formats:
            command = [sys.executable, __file__, "--device", arguments.device, "--one", source, target, recipe]
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            rows.append({"format": recipe, **row, "copy_s": copied})
    if arguments.json:
        print(
            json.dumps({"gigabytes": size / 1e9, "torch": torch.__version__, "device": arguments.device, "rows": rows})
        )
        return
    threads = f"{torch.get_num_threads()} threads"
    print(f"{size / 1e9:.2f} GB bf16, torch {torch.__version__}, {arguments.device}, {threads}; copy {copied:.1f} s\n")
    print("| format | ours s | kitchen s | read s | write s | ours / sum of these | GB/s | peak MB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['format']} | {row['ours_s']:.1f} | {row['kitchen_s']:.1f} | {row['read_s']:.1f} | "
            f"{row['write_s']:.1f} | {row['ratio']:.2f} | {row['gb_per_s']:.2f} | {row['peak_mb']:.0f} |"
        )


if __name__ == "__main__":
    main()
