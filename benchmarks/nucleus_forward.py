"""Nucleus-Image forward beside diffusers' NucleusMoEImageTransformer2DModel: same weights, same inputs, one uncached
call.

Published width, two blocks with all 64 experts, against the reference's loop over experts and against its grouped
product. Target: twice as fast. Run: python benchmarks/nucleus_forward.py [--json]
"""

from __future__ import annotations

import torch
from diffusers import NucleusMoEImageTransformer2DModel as Reference
from side_by_side import compare, report

from nativedit.ldm.layers.patches import patchify
from nativedit.ldm.nucleus.model import NucleusMoEImageTransformer2DModel

PUBLISHED = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "joint_attention_dim": 4096,
    "dense_moe_strategy": "all_moe",
    "num_experts": 64,
    "capacity_factors": 2.0,
}
# name, rows and columns of tokens
SIZES = [("256 tokens", (16, 16)), ("1024 tokens", (32, 32))]
TEXT_TOKENS = 64


def fill(module: torch.nn.Module) -> None:
    """The reference leaves its banks uninitialised."""
    for parameter in module.parameters():
        if parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)


def main() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for path, grouped in (("loop", False), ("grouped", True)):
            torch.manual_seed(0)
            reference = Reference(**PUBLISHED, use_grouped_mm=grouped)
            fill(reference)
            reference = reference.to(dtype).eval()
            ours = NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta", dtype=dtype)
            ours.load_state_dict(reference.state_dict(), assign=True)
            for name, (height, width) in SIZES:
                x = torch.randn(1, 16, 2 * height, 2 * width).to(dtype)
                context = torch.randn(1, TEXT_TOKENS, 4096).to(dtype)
                t = torch.tensor([0.75])  # exact in bfloat16, to which the reference rounds it
                tokens, shape = patchify(x, 2), [(1, height, width)]
                try:
                    rows.append(
                        compare(
                            f"{name}, {str(dtype).removeprefix('torch.')}, reference's {path}",
                            lambda: patchify(ours(x, t, context), 2),  # noqa: B023
                            lambda: reference(tokens, shape, context, None, t, return_dict=False)[0],  # noqa: B023
                            seconds=3.0,
                            least=3,
                        )
                    )
                except (RuntimeError, NotImplementedError) as error:
                    print(f"{name}, {dtype}: the reference's {path} does not run here: {error}")
    report("Nucleus-Image forward", rows)


if __name__ == "__main__":
    main()
