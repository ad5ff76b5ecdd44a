"""PRX and PRXPixel forward beside diffusers' PRXTransformer2DModel: same weights, same inputs, one uncached call.

Published widths, few blocks (time per block is what is compared). Target: not slower at any size, 1.2x.
Run: python benchmarks/prx_forward.py [--json]
"""

from __future__ import annotations

import torch
from diffusers import PRXTransformer2DModel as Reference
from side_by_side import compare, report

from nativedit.ldm.prx.model import PRXTransformer2DModel

# name, configuration, height and width of the input, text tokens. One block at the published widths: on a CPU without
# bfloat16 units a larger picture takes minutes.
LATENT = {"depth": 1}
PIXEL = {
    "in_channels": 3,
    "patch_size": 16,
    "context_in_dim": 2048,
    "hidden_size": 3584,
    "num_heads": 28,
    "depth": 1,
    "axes_dim": [64, 64],
    "bottleneck_size": 768,
    "resolution_embeds": True,
}
SMALL = {
    "in_channels": 3,
    "patch_size": 8,
    "context_in_dim": 128,
    "hidden_size": 256,
    "num_heads": 4,
    "depth": 4,
    "bottleneck_size": 64,
    "resolution_embeds": True,
}
CASES = [
    ("width 256, 64 tokens", SMALL, (64, 64), 16),
    ("width 256, 1024 tokens", SMALL, (256, 256), 16),
    ("latent 1.2B, 128 px", LATENT, (16, 16), 64),
    ("latent 1.2B, 256 px", LATENT, (32, 32), 64),
    ("latent 1.2B, 512 px", LATENT, (64, 64), 64),
    ("pixel 7B, 256 px", PIXEL, (256, 256), 64),
]
BFLOAT16 = CASES[:3]


def main() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, config, size, length in CASES if dtype is torch.float32 else BFLOAT16:
            torch.manual_seed(0)
            reference = Reference(**config).to(dtype).eval()
            for block in reference.blocks:
                torch.nn.init.normal_(block.modulation.lin.weight, std=0.02)
            ours = PRXTransformer2DModel(**config, device="meta", dtype=dtype)
            ours.load_state_dict(reference.state_dict(), assign=True)
            x = torch.randn(1, config.get("in_channels", 16), *size).to(dtype)
            t = torch.tensor([0.7])
            context = torch.randn(1, length, config.get("context_in_dim", 2304)).to(dtype)
            mask = torch.arange(length)[None] < length // 2
            rows.append(
                compare(
                    f"{name}, {str(dtype).removeprefix('torch.')}",
                    lambda: ours(x, t, context, mask),  # noqa: B023
                    lambda: reference(x, t, context, mask, return_dict=False)[0],  # noqa: B023
                    seconds=3.0,
                )
            )
    report("PRX forward", rows)


if __name__ == "__main__":
    main()
