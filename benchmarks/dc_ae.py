"""Time and peak memory of DC-AE beside the one in diffusers."""
# Same weights, same inputs; a quarter of the width of Sana's levels, 512 pixels whole and 1024 pixels in tiles of 512.
# Target: not slower, and no more memory. Measured on two cores, torch 2.13, times faster: decode 1.38; before its norm
# kept channels first, decode in tiles 0.99, encode 1.12. Peak memory is that of a process of its own: its largest
# resident size less what it held before. It differs between runs; ours and the reference in MiB: decode 228 and 268,
# 333 and 333; decode in tiles 236 to 291 in three runs, and 271 and 329 in two.
#
# Run: python benchmarks/dc_ae.py [words of a case] [--memory] [--cpu-time] [--json]
# Words choose cases, for example: decode 512. With --memory nothing is timed.

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable

import torch
from diffusers import AutoencoderDC as Reference
from side_by_side import compare, report, selected

from nativedit.autoencoders.dc_ae import AutoencoderDC

BLOCKS = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
CONFIG = {
    "encoder_block_types": BLOCKS,
    "decoder_block_types": BLOCKS,
    "encoder_block_out_channels": [32, 64, 128, 128, 256, 256],
    "decoder_block_out_channels": [32, 64, 128, 128, 256, 256],
    "upsample_block_type": "interpolate",
    "downsample_block_type": "Conv",
}


def calls(dtype: torch.dtype = torch.float32) -> dict[str, tuple[Callable, Callable]]:
    """Case -> ours and the reference, as calls without arguments."""
    torch.manual_seed(0)
    reference = Reference(**CONFIG).to(dtype).eval()
    ours = AutoencoderDC(**CONFIG, device="meta", dtype=dtype)
    ours.load_state_dict(reference.state_dict(), assign=True)
    small, large = torch.randn(1, 32, 16, 16).to(dtype), torch.randn(1, 32, 32, 32).to(dtype)
    picture = torch.randn(1, 3, 512, 512).to(dtype)
    return {
        "decode 512": (lambda: ours.decode(small), lambda: reference.decode(small).sample),
        "decode 1024 in tiles": (lambda: ours.tiled_decode(large), lambda: reference.tiled_decode(large).sample),
        "encode 512": (lambda: ours.encode(picture), lambda: reference.encode(picture).latent),
    }


def peak(case: str, which: int) -> float:
    """MiB that one call adds to this process at its peak."""
    call = calls()[case][which]
    with torch.inference_mode():
        with open("/proc/self/statm") as file:
            before = int(file.read().split()[1]) * resource.getpagesize()
        call()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20


def peaks(case: str) -> tuple[float, float]:
    """MiB of ours and of the reference."""
    command = [sys.executable, __file__, "--peak", case]
    runs = [subprocess.run([*command, str(i)], capture_output=True, text=True, check=True) for i in (0, 1)]
    ours, reference = (float(run.stdout.splitlines()[-1]) for run in runs)
    return ours, reference


def main() -> None:
    if "--peak" in sys.argv:
        case, which = sys.argv[sys.argv.index("--peak") + 1 :]
        print(json.dumps(peak(case, int(which))))
        return
    cases = selected([(case, *both) for case, both in calls().items()])
    if "--memory" not in sys.argv:
        rows = [compare(case, ours, reference) for case, ours, reference in cases]
        report("DC-AE, a quarter of Sana's width, float32", rows)
    found = {case: peaks(case) for case, *_ in cases}
    if "--json" in sys.argv:
        print(json.dumps({"title": "DC-AE peak memory, MiB", "ours_and_reference": found}, indent=1))
        return
    print("\n| case | ours, peak MiB | reference, peak MiB |\n|---|---|---|")
    for case, (ours, reference) in found.items():
        print(f"| {case} | {ours:.0f} | {reference:.0f} |")


if __name__ == "__main__":
    main()
