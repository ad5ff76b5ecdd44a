"""The command line of quantized files: quantize, dequantize, repair."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .checkpoints.quantize import quantize
from .quant.dequantize import dequantize
from .quant.formats import FORMATS
from .quant.repair import repair
from .quant.report import QuantizationReport


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar with rate and time left; called with (bytes done, bytes in all, layer)."""
    if quiet:
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, unit_divisor=1000, dynamic_ncols=True) as bar:

        def show(done: int, total: int, layer: str) -> None:
            bar.total = total
            bar.set_postfix_str(layer[-40:], refresh=False)
            bar.update(done - bar.n)

        yield show


def _paths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a safetensors file, a shard index or a folder of shards")
    parser.add_argument("destination", help="the file to write, or a folder for one file per shard")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _done(report: QuantizationReport) -> int:
    for warning in report.warnings:
        print(f"note: {warning}")
    return 0


class Quantize:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        _paths(parser)
        parser.add_argument("--format", help=f"{', '.join(FORMATS)}, or int8_convrot (int8 per row, ConvRot group 256)")
        parser.add_argument("--policy", help="generic, or a TOML file; default: the architecture's own rules")
        parser.add_argument("--include", action="append", default=[], metavar="GLOB", help="quantize these layers too")
        parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="keep these layers")
        parser.add_argument("--keep-edges", type=int, default=0, metavar="N", help="keep the first and last N blocks")
        parser.add_argument("--requantize", action="store_true", help="accept a source that is already quantized")
        parser.add_argument("--fast-matmul", action="store_true", help="float8: let the device multiply in float8")
        parser.add_argument("--hash", action="store_true", help="note the source's full hash, not only its header's")
        parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
        parser.add_argument("--dry-run", action="store_true", help="print what would be done with each layer, and why")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        with _progress(args.quiet or args.dry_run) as progress:
            report = quantize(
                args.source,
                args.destination,
                format=args.format,
                policy=args.policy,
                include=args.include,
                exclude=args.exclude,
                keep_edges=args.keep_edges,
                requantize=args.requantize,
                fast_matmul=args.fast_matmul,
                hash_source=args.hash,
                device=args.device,
                dry_run=args.dry_run,
                progress=progress,
            )
        if args.dry_run:
            print(report.table())
        print(report)
        return _done(report)


class Dequantize:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        _paths(parser)
        parser.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16 or float32")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        with _progress(args.quiet) as progress:
            report = dequantize(args.source, args.destination, dtype=args.dtype, progress=progress)
        print(f"{report.destination}: {report.bytes_before / 1e9:.2f} GB -> {report.bytes_after / 1e9:.2f} GB")
        return _done(report)


class Repair:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        _paths(parser)
        parser.add_argument("--original", help="the unquantized model it was made from; settles what the file can't")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        with _progress(args.quiet) as progress:
            report = repair(args.source, args.destination, original=args.original, progress=progress)
        print(f"{report.destination}: written in the form that ComfyUI loads")
        return _done(report)
