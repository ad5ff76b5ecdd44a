"""CogView4 forward beside diffusers' CogView4Transformer2DModel: same weights, same inputs, one uncached call.

Published width, two blocks. Target: not slower at any size. Measured on two cores without bfloat16 units (torch 2.13,
float32): 1.30x at 128 px, 1.21x at 256 px, 1.03x with 128 text tokens, 1.18x at 512 px; bfloat16, all of it one product
of matrices, 1.03x.
Run: python benchmarks/cogview4_forward.py [--json] [words that the cases' names hold]
"""

from __future__ import annotations

import torch
from diffusers import CogView4Transformer2DModel as Reference
from side_by_side import compare, report, selected

from nativedit.ldm.cogview4.model import CogView4Transformer2DModel

PUBLISHED = {"attention_head_dim": 128, "num_attention_heads": 32, "num_layers": 2}
SMALL = {"attention_head_dim": 64, "num_attention_heads": 4, "num_layers": 4}
# name, configuration, height and width of the latent, text tokens, dtype. Larger pictures take a CPU minutes at the
# published width.
F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    ("width 256, 512 px, float32", SMALL, (64, 64), 32, F32),
    ("width 256, 1024 px, float32", SMALL, (128, 128), 32, F32),
    ("published width, 128 px, float32", PUBLISHED, (16, 16), 16, F32),
    ("published width, 256 px, float32", PUBLISHED, (32, 32), 16, F32),
    ("published width, 256 px, long text, float32", PUBLISHED, (32, 32), 128, F32),
    ("published width, 512 px, float32", PUBLISHED, (64, 64), 16, F32),
    ("width 256, 512 px, bfloat16", SMALL, (64, 64), 32, BF16),
    ("published width, 128 px, bfloat16", PUBLISHED, (16, 16), 16, BF16),
]


def main() -> None:
    rows = []
    for name, config, size, length, dtype in selected(CASES):
        torch.manual_seed(0)
        reference = Reference(**config).to(dtype).eval()
        ours = CogView4Transformer2DModel(**config, device="meta", dtype=dtype)
        ours.load_state_dict(reference.state_dict(), assign=True)
        x, context = torch.randn(1, 16, *size).to(dtype), torch.randn(1, length, 4096).to(dtype)
        t, crop = torch.tensor([700.0]), torch.zeros(1, 2)
        sizes = torch.tensor([[8.0 * size[0], 8.0 * size[1]]])
        rows.append(
            compare(
                name,
                lambda: ours(x, t, context, original_size=sizes, target_size=sizes, crop_coords=crop),  # noqa: B023
                lambda: reference(x, context, t, sizes, sizes, crop, return_dict=False)[0],  # noqa: B023
                seconds=8.0,
                least=3,
            )
        )
    report("CogView4 forward", rows)


if __name__ == "__main__":
    main()
