"""CogView4 forward beside diffusers' CogView4Transformer2DModel: same weights, same inputs, one uncached call.

Published width, one block (the time of a block is what is compared). Target: not slower at any size, 1.2x.
Run: python benchmarks/cogview4_forward.py [--json]
"""

from __future__ import annotations

import torch
from diffusers import CogView4Transformer2DModel as Reference
from side_by_side import compare, report

from nativedit.ldm.cogview4.model import CogView4Transformer2DModel

PUBLISHED = {"attention_head_dim": 128, "num_attention_heads": 32, "num_layers": 1}
SMALL = {"attention_head_dim": 64, "num_attention_heads": 4, "num_layers": 4}
# name, configuration, height and width of the latent, text tokens. On a CPU without bfloat16 units a larger picture at
# the published width takes minutes.
CASES = [
    ("width 256, 512 px", SMALL, (64, 64), 32),
    ("width 256, 1024 px", SMALL, (128, 128), 32),
    ("published width, 128 px", PUBLISHED, (16, 16), 16),
    ("published width, 256 px", PUBLISHED, (32, 32), 16),
    ("published width, 256 px, long text", PUBLISHED, (32, 32), 128),
]
BFLOAT16 = CASES[:3]


def main() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, config, size, length in CASES if dtype is torch.float32 else BFLOAT16:
            torch.manual_seed(0)
            reference = Reference(**config).to(dtype).eval()
            ours = CogView4Transformer2DModel(**config, device="meta", dtype=dtype)
            ours.load_state_dict(reference.state_dict(), assign=True)
            x, context = torch.randn(1, 16, *size).to(dtype), torch.randn(1, length, 4096).to(dtype)
            t, crop = torch.tensor([700.0]), torch.zeros(1, 2)
            sizes = torch.tensor([[8.0 * size[0], 8.0 * size[1]]])
            rows.append(
                compare(
                    f"{name}, {str(dtype).removeprefix('torch.')}",
                    lambda: ours(x, t, context, original_size=sizes, target_size=sizes, crop_coords=crop),  # noqa: B023
                    lambda: reference(x, context, t, sizes, sizes, crop, return_dict=False)[0],  # noqa: B023
                    seconds=3.0,
                )
            )
    report("CogView4 forward", rows)


if __name__ == "__main__":
    main()
