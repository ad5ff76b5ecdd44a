"""F-Lite forward beside a plain reading of the same maths (the reference can't be installed): same weights and inputs.

Published width, one block; above the table, what computes attention of its head size here. Products of matrices, the
same in both, are nine tenths of the time at this width. Measured on two cores without bfloat16 units (torch 2.13):
1.19x at 128 px, 0.98x at 256 px and 1.07x at 512 px in float32, 1.33x at 128 px in bfloat16; at width 512, where
attention weighs more, 1.16x at 512 px and 1.66x at 1024 px.
Run: python benchmarks/f_lite_forward.py [--json] [words that the cases' names hold]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from side_by_side import compare, report, selected

from nativedit.ldm.f_lite.model import FLiteTransformer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import plain_f_lite

PUBLISHED = {"depth": 1}
SMALL = {"hidden_size": 512, "num_heads": 2, "depth": 3, "cross_attn_input_size": 256}
# name, configuration, height and width of the latent, dtype. A CPU without bfloat16 units takes minutes for larger
# pictures at the published width.
F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    ("width 512, 512 px, float32", SMALL, (64, 64), F32),
    ("width 512, 1024 px, float32", SMALL, (128, 128), F32),
    ("published width, 128 px, float32", PUBLISHED, (16, 16), F32),
    ("published width, 256 px, float32", PUBLISHED, (32, 32), F32),
    ("published width, 512 px, float32", PUBLISHED, (64, 64), F32),
    ("width 512, 512 px, bfloat16", SMALL, (64, 64), BF16),
    ("published width, 128 px, bfloat16", PUBLISHED, (16, 16), BF16),
]
TEXT_TOKENS = 512
PLAIN = {"num_heads": 12, "hidden_size": 3072, "patch_size": 2, "rope_base": 10000, "residual_v": True}


def attention_backend(head_dim: int, dtype: torch.dtype) -> str:
    """Which of PyTorch's kernels takes such heads on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = torch.empty(1, 1, 1040, head_dim, dtype=dtype, device=device)
    return torch.nn.attention.SDPBackend(torch._fused_sdp_choice(heads, heads, heads)).name


def main() -> None:
    rows = []
    for name, config, size, dtype in selected(CASES):
        torch.manual_seed(0)
        ours = FLiteTransformer(**config, dtype=dtype).eval().requires_grad_(False)
        torch.nn.init.normal_(ours.register_tokens)
        weights, plain = ours.state_dict(), {**PLAIN, **config}
        x = torch.randn(1, 16, *size).to(dtype)
        context = torch.randn(1, TEXT_TOKENS, config.get("cross_attn_input_size", 4096)).to(dtype)
        t = torch.tensor([0.7])
        rows.append(
            compare(
                name,
                lambda: ours(x, t, context),  # noqa: B023
                lambda: plain_f_lite.forward(weights, plain, x, t, context),  # noqa: B023
                seconds=8.0,
                least=3,
            )
        )
    backends = {str(dtype).removeprefix("torch."): attention_backend(256, dtype) for dtype in (F32, BF16)}
    report(f"F-Lite forward, heads of 256 channels by {backends}", rows)


if __name__ == "__main__":
    main()
