"""Sana and SANA-Sprint forward beside diffusers' SanaTransformer2DModel: same weights, same inputs, one uncached call.

Published widths, two blocks (time per block is what is compared). Target: not slower, 1.2x. Then ours alone over the
number of tokens: linear attention should cost time in proportion (slope about 1).
Measured on two cores (torch 2.13, float32), times faster, 0.6B: 0.97 at 512 px, 1.05 at 1024 px, 1.02 at 2K; 1.6B: 0.95
and 1.09; Sprint 1.02. Nine tenths are matrix products on both sides. Power of the number of tokens: 0.89.
Run: python benchmarks/sana_forward.py [--json] [--dtype float32|bfloat16]
"""

from __future__ import annotations

import math
import statistics
import sys
import time

import torch
from diffusers import SanaTransformer2DModel as Reference
from side_by_side import compare, report

from nativedit.ldm.sana.model import SanaTransformer2DModel

LARGE = {"num_layers": 2}
SMALL = {
    "num_layers": 2,
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "cross_attention_head_dim": 72,
    "cross_attention_dim": 1152,
}
SPRINT = {**SMALL, "qk_norm": "rms_norm_across_heads", "guidance_embeds": True}
# name, constructor arguments, latent size; 300 text tokens, of which 60 are real
CASES = [
    ("0.6B 512", SMALL, 16),
    ("0.6B 1024", SMALL, 32),
    ("Sprint 0.6B 1024", SPRINT, 32),
    ("1.6B 512", LARGE, 16),
    ("1.6B 1024", LARGE, 32),
    ("0.6B 2K, position table", {**SMALL, "interpolation_scale": 1.0, "sample_size": 64}, 64),
]


def inputs(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    mask = torch.arange(300)[None] < 60
    return torch.randn(1, 32, size, size).to(dtype), torch.tensor([700.0]), torch.randn(1, 300, 2304).to(dtype), mask


def build(config: dict, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    reference = Reference(**config).to(dtype).eval()
    ours = SanaTransformer2DModel(**config, device="meta", dtype=dtype)
    ours.load_state_dict(reference.state_dict(), assign=True)
    return ours, reference


def slope(times: dict[int, float]) -> float:
    """Of log time over log tokens, least squares: 1 is proportional."""
    x, y = [math.log(n) for n in times], [math.log(t) for t in times.values()]
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def over_tokens() -> dict[int, float]:
    """Milliseconds of our forward (0.6B's width, two blocks, float32) for 256 to 4096 tokens."""
    ours, _ = build(SMALL, torch.float32)
    times = {}
    with torch.inference_mode():
        for size in (16, 24, 32, 48, 64):
            given = inputs(size, torch.float32)
            ours(*given)
            found = []
            for _ in range(5):
                start = time.perf_counter()
                ours(*given)
                found.append(time.perf_counter() - start)
            times[size * size] = min(found) * 1e3
    return times


def main() -> None:
    rows = []
    named = sys.argv[sys.argv.index("--dtype") + 1] if "--dtype" in sys.argv else None
    for dtype in (torch.float32, torch.bfloat16) if named is None else (getattr(torch, named),):
        for name, config, size in CASES:
            ours, reference = build(config, dtype)
            x, t, context, mask = inputs(size, dtype)
            guidance = torch.tensor([0.45]).to(dtype) if config.get("guidance_embeds") else None
            rows.append(
                compare(
                    f"{name}, {str(dtype).removeprefix('torch.')}",
                    lambda: ours(x, t, context, mask, guidance=guidance),  # noqa: B023
                    lambda: reference(  # noqa: B023
                        x,  # noqa: B023
                        context,  # noqa: B023
                        t,  # noqa: B023
                        guidance,  # noqa: B023
                        mask,  # noqa: B023
                        return_dict=False,
                    )[0],
                )
            )
    report("Sana forward", rows)
    times = over_tokens()
    if "--json" not in sys.argv:
        print("\n| tokens | ours ms |\n|---|---|")
        for tokens, milliseconds in times.items():
            print(f"| {tokens} | {milliseconds:.1f} |")
        print(f"\ntime grows with tokens to the power of {slope(times):.2f}")


if __name__ == "__main__":
    main()
