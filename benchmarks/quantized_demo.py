"""The demo model in every format and in three budgets: size, signal to noise, pictures that are right, picture error.

    python benchmarks/quantized_demo.py [--prompts 60] [--part 1/2] [--products]

A picture is right when the pixel check of scripts/demo_pictures.py finds all that its prompt names; the prompts name
combinations that training never had. The picture error is the root mean square of what changes in the pixels (0..255)
against the unquantized model from the same noise. Weights are multiplied in float32;
--products rounds activations too, as ComfyUI's integer products do, which takes a CPU many times as long.

Numbers: docs/quantization.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nativedit
from nativedit.checkpoints.load import load_diffusion_model
from nativedit.ldm.layers.operations import CastOps
from nativedit.quant.formats import OFFERED
from nativedit.quant.ops import ComfyUIOps, DequantizedOps

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_pictures  # noqa: E402
import train_demo  # noqa: E402

SOURCE = ROOT / "demo" / train_demo.TRANSFORMER_FILE
BUDGETS = ({"target_size": "3.6MB"}, {"target_size": "4.1MB"}, {"min_sqnr": "35dB"})


@dataclass(frozen=True)
class Row:
    name: str
    nbytes: int
    sqnr: float
    right: float
    error: float


def rows(count: int, wishes: list[dict[str, Any]], seed: int = 2, operations: Any = DequantizedOps) -> Iterator[Row]:
    """The unquantized model first."""
    _, text_encoder, tokenizer = train_demo.load(ROOT / "demo")
    prompts = demo_pictures.held_out_prompts(count, seed)

    def pictures(path: Path) -> np.ndarray:
        module = load_diffusion_model(path, operations=CastOps, quantized_operations=operations)
        with torch.inference_mode():
            return train_demo.sample(module.eval(), text_encoder, tokenizer, prompts, seed=seed)

    def right(made: np.ndarray) -> float:
        return float(np.mean([not demo_pictures.check(one, prompt) for one, prompt in zip(made, prompts, strict=True)]))

    exact = pictures(SOURCE)
    yield Row("bfloat16", SOURCE.stat().st_size, float("inf"), right(exact), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for wish in wishes:
            path = Path(folder) / "quantized.safetensors"
            report = nativedit.quantize(SOURCE, path, measure=True, **wish)
            made = pictures(path)
            error = 255 * float(np.sqrt(np.square(made - exact).mean()))
            name = wish.get("format") or " ".join(f"{key} {value}" for key, value in wish.items())
            yield Row(name, path.stat().st_size, report.sqnr, right(made), error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--part", default="1/1", help="1/2: the first half of the table")
    parser.add_argument("--products", action="store_true", help="integer products, as in ComfyUI")
    args = parser.parse_args()
    count, (part, parts) = args.prompts, map(int, args.part.split("/"))
    wishes = [*({"format": name} for name in OFFERED), *BUDGETS]
    size = -(-len(wishes) // parts)
    print("| stored as | file | signal to noise | pictures right | picture error |\n|---|---|---|---|---|")
    operations = ComfyUIOps if args.products else DequantizedOps
    for row in rows(count, wishes[size * (part - 1) : size * part], operations=operations):
        sqnr = "exact" if row.sqnr == float("inf") else f"{row.sqnr:.1f} dB"
        right = f"{round(row.right * count)} of {count}"
        print(f"| {row.name} | {row.nbytes / 1e6:.2f} MB | {sqnr} | {right} | {row.error:.2f} |", flush=True)


if __name__ == "__main__":
    main()
