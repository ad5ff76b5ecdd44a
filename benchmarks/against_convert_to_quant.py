"""Quantizing beside convert-to-quant, the other command-line quantizer of ComfyUI's formats: time, memory and error.

    python -m venv ctq && ctq/bin/pip install convert-to-quant prodigy-plus-schedule-free triton
    python benchmarks/against_convert_to_quant.py --ctq ctq/bin/ctq [--gigabytes 1.2] [--formats nvfp4 ...]
    python benchmarks/against_convert_to_quant.py --ctq ctq/bin/ctq --learned [--formats nvfp4 ...]

The first compares files: a bfloat16 model with the matrices of a DiT (see quant_speed.py), one run each of
`ctq --simple --low-memory --device cpu` and `nativedit quantize --device cpu`, also with `--compute float32`. Memory is
the process's largest resident size, read pages of files included; SQNR is of the weights, over one block. --folder
names where files lie: in a RAM disk the disk's own speed stays out of it.

The second compares better rounding: some layers of 768 x 768 and 1536 x 768, ctq's learned rounding with --iterations
steps beside `nativedit quantize --rounding feedback`, and the error of outputs for Gaussian inputs.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from quant_speed import make_model
from safetensors.torch import save_file

from nativedit.files import open_source
from nativedit.quant.layer import dequantize_rows
from nativedit.quant.measure import relative_error, sqnr
from nativedit.quant.reader import read_quantized

MODES = {
    "int8_convrot": "--int8 --scaling_mode row --convrot",
    "float8_e4m3fn": "",
    "nvfp4": "--nvfp4",
}


def run(command: list[str]) -> tuple[float, float]:
    """Seconds and the largest resident size in MB, which Linux notes for the process as it is after exec."""
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = largest_resident(process.pid) or peak
            time.sleep(0.02)
        seconds = time.perf_counter() - started
        if process.returncode:
            said.seek(0)
            tail = said.read().decode(errors="replace")[-1500:]
            raise SystemExit(f"{shlex.join(command)} failed:\n{tail}")
    return seconds, peak / 1024


def largest_resident(pid: int) -> int:
    with suppress(OSError), open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("VmHWM")), 0)
    return 0


def ours(source: Path, target: Path, recipe: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "nativedit", "quantize", str(source), str(target), "--format", recipe]
    return [*command, "--policy", "generic", "--device", "cpu", "--quiet", *options]


def theirs(ctq: str, source: Path, target: Path, recipe: str, *options: str) -> list[str]:
    command = [*shlex.split(ctq), "-i", str(source), "-o", str(target), "--comfy_quant", "--low-memory"]
    return [*command, "--device", "cpu", *options, *MODES[recipe].split()]


def layers(source: Path, quantized: Path, prefix: str):
    """(weight, restored weight) of the quantized layers whose names begin so."""
    with open_source(source) as original, open_source(quantized) as stored:
        for layer in read_quantized(stored).layers.values():
            if layer.name.startswith(prefix):
                weight = original.read(f"{layer.name}.weight").float()
                rows = dequantize_rows(stored, layer, 0, layer.shape[0], torch.float32)
                yield weight, rows[: weight.shape[0], : weight.shape[1]]


def mean_sqnr(source: Path, quantized: Path) -> float:
    values = [sqnr(*pair) for pair in layers(source, quantized, "blocks.0.")]
    return sum(values) / len(values)


def files(arguments: argparse.Namespace, folder: Path) -> None:
    source, target = folder / "model.safetensors", folder / "quantized.safetensors"
    make_model(source, arguments.gigabytes)
    size = source.stat().st_size / 1e9
    print(f"{size:.2f} GB bf16, torch {torch.__version__}, {torch.get_num_threads()} threads, {folder}\n")
    print("| format | who | s | times faster | MB | part of the memory | SQNR dB | dB more |\n" + "|---" * 8 + "|")
    for recipe in arguments.formats:
        runs = {"convert-to-quant": theirs(arguments.ctq, source, target, recipe, "--simple")}
        runs["nativedit"] = ours(source, target, recipe)
        runs["nativedit, float32"] = ours(source, target, recipe, "--compute", "float32")
        base: tuple[float, float, float] | None = None
        for who, command in runs.items():
            target.unlink(missing_ok=True)
            seconds, memory = run(command)
            found = (seconds, memory, mean_sqnr(source, target))
            base = base or found
            print(
                f"| {recipe} | {who} | {found[0]:.1f} | {base[0] / found[0]:.1f} | {found[1]:.0f} | "
                f"{found[1] / base[1]:.2f} | {found[2]:.2f} | {found[2] - base[2]:+.2f} |",
                flush=True,
            )


def learned(arguments: argparse.Namespace, folder: Path) -> None:
    source, target = folder / "layers.safetensors", folder / "quantized.safetensors"
    noise = torch.Generator().manual_seed(0)
    wide, tall = (torch.randn(*shape, generator=noise) for shape in ((768, 768), (1536, 768)))
    spread = torch.exp(torch.randn(768, 768, generator=noise))
    weights = {"gaussian": wide * 0.02, "tall": tall * 0.02, "heavy": wide * spread * 0.02}
    named = {f"blocks.0.{name}.weight": weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file(named, source)
    tokens = torch.randn(4096, 768, generator=noise)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.iterations} iterations\n")
    print("| format | who | s | error of outputs: " + ", ".join(sorted(weights)) + " |\n|---|---|---|---|")
    for recipe in arguments.formats:
        everything = ("--include", "blocks.*")
        runs = {
            "plain": ours(source, target, recipe, *everything),
            "convert-to-quant, simple": theirs(arguments.ctq, source, target, recipe, "--simple"),
            "convert-to-quant, learned": theirs(
                arguments.ctq, source, target, recipe, "--num_iter", str(arguments.iterations)
            ),
            "feedback": ours(source, target, recipe, *everything, "--rounding", "feedback"),
        }
        for who, command in runs.items():
            target.unlink(missing_ok=True)
            seconds, _ = run(command)
            errors = {}
            for name in sorted(weights):
                for weight, restored in layers(source, target, f"blocks.0.{name}"):
                    errors[name] = relative_error(tokens @ weight.t(), tokens @ restored.t())
            shown = ", ".join(f"{error:.5f}" for error in errors.values())
            print(f"| {recipe} | {who} | {seconds:.1f} | {shown} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ctq", default="ctq", help="convert-to-quant's command")
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--formats", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--folder", default=None)
    parser.add_argument("--learned", action="store_true", help="compare better rounding instead")
    parser.add_argument("--iterations", type=int, default=100, help="of the learned rounding")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        (learned if arguments.learned else files)(arguments, Path(folder))


if __name__ == "__main__":
    main()
