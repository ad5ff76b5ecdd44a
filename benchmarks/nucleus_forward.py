"""Nucleus-Image forward beside diffusers' NucleusMoEImageTransformer2DModel: same weights, same inputs, one uncached
call.

Published width, two blocks with all 64 experts, against the reference's loop over experts and against its grouped
product. Target: twice as fast. Measured on two cores without bfloat16 units (torch 2.13), times faster:
float32 1.40 and 1.30 than the loop (256 and 1024 tokens), 1.46 and 1.29 than the grouped product, all but a twentieth
of it being matrix products on both sides; bfloat16 7.3 than the loop (256 tokens).
Run: python benchmarks/nucleus_forward.py [--json] [--dtype float32|bfloat16] [--path loop|grouped]
One dtype and one path take a minute or two and, in float32, 6 GB.
"""

from __future__ import annotations

import argparse

import torch
from diffusers import NucleusMoEImageTransformer2DModel as Reference
from side_by_side import compare, report

from nativedit.ldm.layers.patches import patchify
from nativedit.ldm.nucleus.model import NucleusMoEImageTransformer2DModel
from nativedit.quant.banks import SLOW_ON_A_CPU

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


def drawn(key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Drawing a billion numbers takes longer than the benchmark: experts are one matrix, its rows turned."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype) if ".norm" in key else torch.zeros(shape, dtype=dtype)
    if len(shape) == 2:
        return torch.randn(shape).mul_(shape[1] ** -0.5).to(dtype)
    one, bank = torch.randn(shape[1:]).mul_(shape[1] ** -0.5).to(dtype), torch.empty(shape, dtype=dtype)
    for expert, matrix in enumerate(bank):
        matrix.copy_(one.roll(expert, 0))
    return bank


def both(dtype: torch.dtype, grouped: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours and the reference, with the same tensors."""
    torch.manual_seed(0)
    with torch.device("meta"):
        reference = Reference(**PUBLISHED, use_grouped_mm=grouped)
    # Its tables are no parameters and would stay on meta.
    reference.pos_embed = type(reference.pos_embed)(theta=10000, axes_dim=[16, 56, 56], scale_rope=True)
    state = {key: drawn(key, value.shape, dtype) for key, value in reference.state_dict().items()}
    reference.load_state_dict(state, assign=True)
    ours = NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta", dtype=dtype)
    ours.load_state_dict(state, assign=True)
    return ours.eval(), reference.eval()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="read by report")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--path", choices=("loop", "grouped"))
    chosen = parser.parse_args()
    rows = []
    for dtype in [chosen.dtype] if chosen.dtype else ["float32", "bfloat16"]:
        for path in [chosen.path] if chosen.path else ["loop", "grouped"]:
            ours, reference = both(getattr(torch, dtype), path == "grouped")
            slow = getattr(torch, dtype) in SLOW_ON_A_CPU  # the reference would take minutes for the larger picture
            for name, (height, width) in SIZES[:1] if slow else SIZES:
                x = torch.randn(1, 16, 2 * height, 2 * width).to(ours.dtype)
                context = torch.randn(1, TEXT_TOKENS, 4096).to(ours.dtype)
                t = torch.tensor([0.75])  # exact in bfloat16, to which the reference rounds it
                tokens, shape = patchify(x, 2), [(1, height, width)]
                try:
                    rows.append(
                        compare(
                            f"{name}, {dtype}, reference's {path}",
                            lambda: patchify(ours(x, t, context), 2),  # noqa: B023
                            lambda: reference(tokens, shape, context, None, t, return_dict=False)[0],  # noqa: B023
                            seconds=3.0,
                            least=1 if slow else 3,
                        )
                    )
                except (RuntimeError, NotImplementedError) as error:
                    print(f"{name}, {dtype}: the reference's {path} does not run here: {error}")
    report("Nucleus-Image forward", rows)


if __name__ == "__main__":
    main()
