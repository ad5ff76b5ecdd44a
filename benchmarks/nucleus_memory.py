"""What Nucleus-Image's weights need at least, worked out from the shapes of the published model; nothing is run.

Per format: all weights; the largest resident set when blocks are streamed (the largest block, and what is outside of
the blocks), with the piece of a quantized bank that its product unpacks to bfloat16 at a time. Activations come on top:
1024 x 1024 pixels are 4096 tokens, both prompts together need about 1 GB.
Run: python benchmarks/nucleus_memory.py
"""

from __future__ import annotations

import re

from nativedit.ldm.nucleus.model import NucleusMoEImageTransformer2DModel
from nativedit.quant.banks import PIECE
from nativedit.quant.formats import FORMATS, parse_recipe
from nativedit.quant.policy import Policy, decide
from nativedit.supported_models import get_architecture

PUBLISHED = {
    "out_channels": 16,
    "num_layers": 32,
    "num_key_value_heads": 4,
    "joint_attention_dim": 4096,
    "dense_moe_strategy": "leave_first_three_blocks_dense",
    "num_experts": 64,
    "capacity_factors": [0.0, 0.0, 0.0, 4.0, 4.0, *[2.0] * 27],
}
NAMES = ("bfloat16", "int8_convrot", "float8_e4m3fn", "nvfp4", "convrot_w4a4")
GB = 1e9


def stored_bytes(name: str) -> tuple[dict[str, int], int]:
    """({key: bytes}, bytes in bfloat16 of the most experts that are unpacked at a time for a product)."""
    state = NucleusMoEImageTransformer2DModel(**PUBLISHED, device="meta").state_dict()
    tensors = {key: ("BF16", tuple(value.shape), 2 * value.numel()) for key, value in state.items()}
    sizes = {key: size for key, (_, _, size) in tensors.items()}
    if name not in ("bfloat16",):
        policy = Policy(parse_recipe(name), card=get_architecture("nucleus_image").quantization)
        sizes |= {decision.key: decision.bytes_after for decision in decide(tensors, policy)}
    banks = [shape for key, (_, shape, size) in tensors.items() if sizes[key] != size and ".experts." in key]
    experts = [rows * columns for _, rows, columns in banks]
    return sizes, max((2 * expert * max(1, PIECE // expert) for expert in experts), default=0)


def main() -> None:
    assert set(NAMES[2:]) <= set(FORMATS)
    names = ("weights", "all in memory", "least with blocks streamed", "outside of blocks", "largest block")
    print("| " + " | ".join((*names, "experts unpacked at a time")) + " |")
    print("|---|---|---|---|---|---|")
    for name in NAMES:
        sizes, unpacked = stored_bytes(name)
        blocks: dict[str, int] = {}
        for key, size in sizes.items():
            found = re.match(r"transformer_blocks\.\d+", key)
            place = found[0] if found else ""
            blocks[place] = blocks.get(place, 0) + size
        outside = blocks.pop("")
        largest = max(blocks.values())
        numbers = (sum(sizes.values()), outside + largest + unpacked, outside, largest, unpacked)
        print(f"| {name} | " + " | ".join(f"{number / GB:.2f} GB" for number in numbers) + " |")


if __name__ == "__main__":
    main()
