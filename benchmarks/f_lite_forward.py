"""F-Lite forward beside a plain reading of the same maths (the reference can't be installed): same weights and inputs.

Published width, one block (the time of a block is what is compared). Target: 1.2x at any size.
Run: python benchmarks/f_lite_forward.py [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from side_by_side import compare, report

from nativedit.ldm.f_lite.model import FLiteTransformer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import plain_f_lite

PUBLISHED = {"depth": 1}
SMALL = {"hidden_size": 512, "num_heads": 2, "depth": 3, "cross_attn_input_size": 256}
# name, configuration, height and width of the latent. On a CPU without bfloat16 units a larger picture at the published
# width takes minutes.
CASES = [
    ("width 512, 512 px", SMALL, (64, 64)),
    ("width 512, 1024 px", SMALL, (128, 128)),
    ("published width, 128 px", PUBLISHED, (16, 16)),
    ("published width, 256 px", PUBLISHED, (32, 32)),
]
BFLOAT16 = CASES[:3]
TEXT_TOKENS = 512
PLAIN = {"num_heads": 12, "hidden_size": 3072, "patch_size": 2, "rope_base": 10000, "residual_v": True}


def main() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, config, size in CASES if dtype is torch.float32 else BFLOAT16:
            torch.manual_seed(0)
            ours = FLiteTransformer(**config, dtype=dtype).eval().requires_grad_(False)
            torch.nn.init.normal_(ours.register_tokens)
            weights, plain = ours.state_dict(), {**PLAIN, **config}
            x = torch.randn(1, 16, *size).to(dtype)
            context = torch.randn(1, TEXT_TOKENS, config.get("cross_attn_input_size", 4096)).to(dtype)
            t = torch.tensor([0.7])
            rows.append(
                compare(
                    f"{name}, {str(dtype).removeprefix('torch.')}",
                    lambda: ours(x, t, context),  # noqa: B023
                    lambda: plain_f_lite.forward(weights, plain, x, t, context),  # noqa: B023
                    seconds=3.0,
                )
            )
    report("F-Lite forward", rows)


if __name__ == "__main__":
    main()
