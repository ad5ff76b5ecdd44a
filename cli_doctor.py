"""The command line of `doctor`: which formats this machine can make, which it multiplies fast, who can read them."""

from __future__ import annotations

import argparse
import json


class Doctor:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print JSON")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        from .quant.doctor import examine

        found = examine()
        if args.json:
            print(json.dumps(found, indent=2))
            return 0
        for name in ("python", "torch", "comfy-kitchen", "device"):
            print(f"{name:<14}{found[name]}")
        heads = ("format", "made here", "fast here", "ComfyUI: linear", "embedding", "experts", "cut along inputs")
        rows = [
            (
                row["format"],
                "yes" if not row["problem"] else "no",
                "yes" if row["fast"] else "no",
                *(row["comfyui"].get(kind, "-") for kind in ("linear", "embedding", "bank")),
                f"every {row['inputs']}" if row["inputs"] > 1 else "anywhere",
            )
            for row in found["formats"]
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        print()
        for row in (heads, *rows):
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        print("\nAll are cut along their outputs anywhere. What is not fast is unpacked and multiplied as floats.")
        for problem in dict.fromkeys(row["problem"] for row in found["formats"] if row["problem"]):
            print(f"  {problem}")
        return 0
