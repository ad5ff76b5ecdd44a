"""Sana's forward pass beside the one in diffusers."""
# Same weights, one uncached call. Published widths, two blocks, so that the time of a block is compared; not slower is
# the target, 1.2 times is the aim. Rows without a remark give both sides the same tensors: 300 text tokens, 60 of them
# real and the others masked. Rows "as called" give each side what its own pipeline gives it for a prompt of 60 tokens:
# diffusers pads to 300 and masks, our text encoders make no padding. The results are equal, see the last column.
# Then ours alone over the number of tokens: linear attention should cost time in proportion, a slope of about 1.
#
# Run: python benchmarks/sana_forward.py [words of a case] [--dtype float32] [--cpu-time] [--json]
# Words choose cases, for example: 0.6B 512; then the table over tokens is left out.
#
# Times faster, float32, torch 2.13, the same tensors, two cores: 0.6B 1.01 at 512 px, 1.03 at 1024 px, 1.10 at 2K;
# 1.6B 1.12 and 1.08; Sprint 0.97 (one thread: 1.00). As called: 1.08, 1.10, 1.03; 1.26 and 1.13; 1.10. Runs differ by
# some hundredths. Nine tenths are the same matrix products on both sides.
# bfloat16 on a processor without instructions for it, one thread, the same tensors: 0.6B 1.57 at 512 px, 2.68 at
# 1024 px: the reference's 1x1 convolutions, which are matrix products here, are what takes its time.
# Power of the number of tokens: 0.84.

from __future__ import annotations

import math
import statistics
import sys
import time

import torch
from diffusers import SanaTransformer2DModel as Reference
from side_by_side import compare, report, selected

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
# name, constructor arguments, latent size
SIZES = [
    ("0.6B 512", SMALL, 16),
    ("0.6B 1024", SMALL, 32),
    ("Sprint 0.6B 1024", SPRINT, 32),
    ("1.6B 512", LARGE, 16),
    ("1.6B 1024", LARGE, 32),
    ("0.6B 2K, position table", {**SMALL, "interpolation_scale": 1.0, "sample_size": 64}, 64),
]
TOKENS, PROMPT = 300, 60


def inputs(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    mask = torch.arange(TOKENS)[None] < PROMPT
    return torch.randn(1, 32, size, size).to(dtype), torch.tensor([700.0]), torch.randn(1, TOKENS, 2304).to(dtype), mask


def build(config: dict, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    reference = Reference(**config).to(dtype).eval()
    ours = SanaTransformer2DModel(**config, device="meta", dtype=dtype)
    ours.load_state_dict(reference.state_dict(), assign=True)
    return ours, reference


def measured(name: str, config: dict, size: int, dtype: torch.dtype, as_called: bool):
    """A row of the table. Processors without bfloat16 take a minute for a call in it: one such call is enough."""
    ours, reference = build(config, dtype)
    x, t, context, mask = inputs(size, dtype)
    guidance = torch.tensor([0.45]).to(dtype) if config.get("guidance_embeds") else None
    text, shown = (context[:, :PROMPT], None) if as_called else (context, mask)
    slow = dtype == torch.bfloat16 and x.device.type == "cpu"
    return compare(
        name,
        lambda: ours(x, t, text, shown, guidance=guidance),
        lambda: reference(x, context, t, guidance, mask, return_dict=False)[0],
        seconds=3.0 if slow else 6.0,
        least=1 if slow else 5,
    )


def slope(times: dict[int, float]) -> float:
    """Of log time over log tokens, least squares: 1 is proportional."""
    x, y = [math.log(n) for n in times], [math.log(t) for t in times.values()]
    mx, my = statistics.mean(x), statistics.mean(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def over_tokens() -> dict[int, float]:
    """Milliseconds of our forward for 256 to 4096 tokens."""
    # 0.6B's width, two blocks, float32
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
    named = sys.argv[sys.argv.index("--dtype") + 1] if "--dtype" in sys.argv else "float32"
    cases = [
        (f"{name}{remark}", config, size, as_called)
        for name, config, size in SIZES
        for remark, as_called in (("", False), (", as called", True))
    ]
    chosen = selected(cases)
    rows = [measured(name, config, size, getattr(torch, named), as_called) for name, config, size, as_called in chosen]
    report(f"Sana forward, {named}", rows)
    if len(chosen) < len(cases) or "--json" in sys.argv:
        return
    times = over_tokens()
    print("\n| tokens | ours ms |\n|---|---|")
    for tokens, milliseconds in times.items():
        print(f"| {tokens} | {milliseconds:.1f} |")
    print(f"\ntime grows with tokens to the power of {slope(times):.2f}")


if __name__ == "__main__":
    main()
