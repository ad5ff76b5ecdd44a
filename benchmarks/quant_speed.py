"""Rate and memory of every format from file to file, beside comfy-kitchen in memory and a plain copy of the bytes.

    python benchmarks/quant_speed.py [--gigabytes 3.6] [--formats int8_convrot ...] [--device cpu] [--json]

The model has the matrices of a DiT: blocks of attention [3D, D], [D, D] and MLP [4D, D], [D, 4D] with D = 3072 in
bfloat16. "kitchen" quantizes the same weights, already in memory, with comfy-kitchen alone: no reading, no writing.
"expected" is what kitchen's time and one read and one write of the bytes add up to; ours should not take longer.
Each format runs in a process of its own; memory is the peak of the process's own pages (not the page cache) over what
importing torch and comfy-kitchen takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from nativedit.files import SafetensorsWriter, open_source
from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.kitchen import quantize_matrix, tensor_scale

WIDTH = 3072
SHAPES = (
    ("attn.qkv", (3 * WIDTH, WIDTH)),
    ("attn.proj", (WIDTH, WIDTH)),
    ("mlp.up", (4 * WIDTH, WIDTH)),
    ("mlp.down", (WIDTH, 4 * WIDTH)),
)
BLOCK_BYTES = 2 * sum(rows * columns for _, (rows, columns) in SHAPES)


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


def copy_seconds(source: Path, target: Path) -> float:
    started = time.perf_counter()
    with open_source(source) as opened:
        entries = [(info.name, info.dtype, info.shape) for info in opened.tensors.values()]
        with SafetensorsWriter(target, entries) as writer:
            for name in opened:
                writer.write(name, opened.read(name))
    return time.perf_counter() - started


def kitchen_seconds(source: Path, recipe_name: str, device: str) -> float:
    """One block's weights, then scaled to the whole model."""
    recipe, total, sample = parse_recipe(recipe_name), 0, []
    with open_source(source) as opened:
        total = sum(info.nbytes for info in opened.tensors.values())
        sample = [opened.read(name).to(device) for name in opened if name.startswith("blocks.0.")]
    quantize_matrix(sample[1], recipe, scale=tensor_scale(recipe, sample[1].abs().amax()))
    started = time.perf_counter()
    for weight in sample:
        quantize_matrix(weight, recipe, scale=tensor_scale(recipe, weight.abs().amax()))
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * total / sum(weight.nbytes for weight in sample)


def one(source: Path, target: Path, recipe: str, device: str) -> dict[str, float]:
    from nativedit.quant.convert import quantize
    from nativedit.quant.kitchen import layout_of

    layout_of(parse_recipe(recipe).format)
    base, peak = anonymous_bytes(), [0]

    def progress(done: int, total: int, label: str) -> None:
        peak[0] = max(peak[0], anonymous_bytes())

    started = time.perf_counter()
    quantize(source, target, format=recipe, device=device, progress=progress)
    seconds = time.perf_counter() - started
    kitchen = kitchen_seconds(source, recipe, device)
    return {"ours_s": seconds, "kitchen_s": kitchen, "peak_mb": (peak[0] - base) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.6)
    parser.add_argument("--formats", nargs="+", default=[*FORMATS, "int8_convrot"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        source, target, recipe = arguments.one
        print(json.dumps(one(Path(source), Path(target), recipe, arguments.device)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source, target = Path(folder) / "model.safetensors", Path(folder) / "out.safetensors"
        make_model(source, arguments.gigabytes)
        size = source.stat().st_size / 1e9
        copied = copy_seconds(source, target)
        rows = []
        for recipe in arguments.formats:
            command = [sys.executable, __file__, "--device", arguments.device, "--one", source, target, recipe]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            expected = row["kitchen_s"] + copied
            rows.append(
                {"format": recipe, **row, "copy_s": copied, "expected_s": expected, "gb_per_s": size / row["ours_s"]}
            )
    if arguments.json:
        print(json.dumps({"gigabytes": size, "torch": torch.__version__, "device": arguments.device, "rows": rows}))
        return
    print(f"{size:.2f} GB bf16, torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads\n")
    print("| format | ours s | kitchen s | copy s | kitchen + copy s | GB/s | peak MB |\n|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['format']} | {row['ours_s']:.1f} | {row['kitchen_s']:.1f} | {row['copy_s']:.1f} | "
            f"{row['expected_s']:.1f} | {row['gb_per_s']:.2f} | {row['peak_mb']:.0f} |"
        )


if __name__ == "__main__":
    main()
