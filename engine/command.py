"""``nativedit run``."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

__all__ = ["Run"]

MODELS_VARIABLE = "NATIVEDIT_MODELS_DIR"
DEFAULT_MODELS = f"${MODELS_VARIABLE}, the ComfyUI that this pack lies in, ./models"


class Run:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("workflow", help="as exported from ComfyUI (File > Export), or a picture it saved")
        parser.add_argument(
            "--models-dir",
            action="append",
            metavar="DIR",
            help=f"a folder in the layout of ComfyUI's models/; may be given several times (default: {DEFAULT_MODELS})",
        )
        parser.add_argument("--output-dir", default="output", metavar="DIR", help="where pictures go (default: output)")
        parser.add_argument("--input-dir", metavar="DIR", help="where LoadImage looks (default: the workflow's folder)")
        parser.add_argument(
            "--server", metavar="URL", help="run on a ComfyUI, for example the one at http://localhost:8188"
        )
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="NODE.INPUT=VALUE",
            help="change an input; a node is named by its id, title or class. May be given several times",
        )
        parser.add_argument("--seed", type=int, help="for every seed in the workflow; -1 draws one")
        parser.add_argument(
            "--json", action="store_true", help="print pictures, files, seeds, times and cached nodes as JSON"
        )
        parser.add_argument("--quiet", action="store_true", help="print nothing but the paths of pictures and files")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        from . import run

        result = run(
            args.workflow,
            models_dir=args.models_dir or default_models_dirs(),
            output_dir=args.output_dir,
            engine=args.server or "embedded",
            input_dir=args.input_dir,
            values=dict(_assignment(text) for text in args.set),
            seed=args.seed,
            progress=not (args.quiet or args.json),
        )
        if args.json:
            report = {
                "pictures": [str(path) for path in result.pictures],
                "files": [str(path) for path in result.files],
                "seeds": result.seeds,
                "seconds": {node: round(seconds, 3) for node, seconds in result.seconds.items()},
                "cached": result.cached,
                "notes": result.notes,
            }
            print(json.dumps(report, indent=2))
        else:
            for node_id, seed in {} if args.quiet else result.seeds.items():
                print(f"seed of node {node_id}: {seed}")
            for path in [*result.pictures, *result.files]:
                print(path)
        return 0


def _assignment(text: str) -> tuple[str, str]:
    target, equals, value = text.partition("=")
    if not equals or "." not in target:
        raise ValueError(f"--set {text}: NODE.INPUT=VALUE was expected")
    return target, value


def default_models_dirs() -> list[Path]:
    """Where models are when nobody says: the variable, the ComfyUI around the pack, ./models; those that exist."""
    if named := os.environ.get(MODELS_VARIABLE):
        return [Path(part) for part in named.split(os.pathsep) if part]
    # Not resolved: a pack that is linked into custom_nodes/ belongs to that ComfyUI.
    pack = Path(os.path.abspath(__file__)).parent.parent
    around = [pack.parent.parent / "models"] if pack.parent.name == "custom_nodes" else []
    return [folder for folder in [*around, Path("models")] if folder.is_dir()]
