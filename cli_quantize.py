"""The command line of quantized files: quantize, dequantize, repair."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .checkpoints.quant_report import report_data, report_kind, report_policy
from .checkpoints.quantize import quantize
from .cli_report import save_report
from .files.paths import same_file
from .quant.budget import split_formats
from .quant.calibration import read_calibration
from .quant.craft import COMPUTE, Craft
from .quant.dequantize import dequantize
from .quant.formats import FORMATS
from .quant.repair import repair
from .quant.report import QuantizationReport
from .quant.rounding import ROUNDING, Rounding


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar with rate and time left; called with (bytes done, bytes in all, layer)."""
    if quiet:
        yield None
        return
    from tqdm import tqdm

    bar: tqdm | None = None

    def show(done: int, total: int, layer: str) -> None:
        nonlocal bar
        if bar is None:  # not before there is something to show: an error message should stand alone
            bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1000, dynamic_ncols=True)
        bar.total = total
        bar.set_postfix_str(layer[-40:], refresh=False)
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number of blocks (0, 1, 2, ...)")
    return int(text)


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
        parser.add_argument("--policy", help="generic, a TOML file, or a file made within a budget (its plan)")
        parser.add_argument("--include", action="append", default=[], metavar="GLOB", help="quantize these layers too")
        parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="keep these layers")
        parser.add_argument("--keep-edges", type=_count, default=0, metavar="N", help="keep N blocks at either end")
        budget = parser.add_argument_group("a budget chooses each layer's format")
        budget.add_argument("--target-size", metavar="SIZE", help="best quality in a file of at most 6GB, 5.5GiB, ...")
        budget.add_argument(
            "--min-sqnr", metavar="DB", help="smallest file whose signal to noise is at least 35dB, ..."
        )
        budget.add_argument("--formats", metavar="A,B", help="choose between these (default: --format, or all)")
        parser.add_argument(
            "--for", dest="target", metavar="DEVICE", help="fast formats alone: sm89 (CUDA 8.9), cpu, mps"
        )
        parser.add_argument("--comfyui", metavar="VERSION", help="only formats that this ComfyUI reads: 0.29")
        craft = parser.add_argument_group("how codes are made")
        craft.add_argument(
            "--compute", choices=COMPUTE, default=COMPUTE[0], help="arithmetic: the weight's own type (ComfyUI's bytes)"
        )
        craft.add_argument("--calibration", metavar="FILE", help="from nativedit calibrate: scales of layers' inputs")
        craft.add_argument(
            "--smooth", action="store_true", help="even out calibrated inputs of nvfp4 (needs ComfyUI 0.30)"
        )
        craft.add_argument(
            "--rounding", choices=ROUNDING, default=ROUNDING[0], help="feedback: less error for more time, same storage"
        )
        craft.add_argument(
            "--rounding-seconds", type=float, metavar="S", help="at most S per million weights of a layer and thread"
        )
        parser.add_argument("--report", metavar="FILE", help="errors, sizes and reasons as .html, .png or .json")
        parser.add_argument("--save-policy", metavar="FILE.toml", help="the choice as a policy that gives it again")
        parser.add_argument("--requantize", action="store_true", help="accept a source that is already quantized")
        parser.add_argument("--fast-matmul", action="store_true", help="float8: let the device multiply in float8")
        parser.add_argument("--hash", action="store_true", help="note the source's full hash, not only its header's")
        parser.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
        parser.add_argument("--dry-run", action="store_true", help="print what would be done with each layer, and why")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        _check_outputs(args)
        measuring = args.report or args.target_size or args.min_sqnr
        only_headers = args.dry_run and not measuring
        with _progress(args.quiet or only_headers) as progress:
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
                target_size=args.target_size,
                min_sqnr=args.min_sqnr,
                formats=split_formats(args.formats or ""),
                target=args.target,
                comfyui=args.comfyui,
                measure=args.report is not None,
                craft=_craft(args),
                progress=progress,
            )
        if args.dry_run:
            print(report.table())
        print(report)
        if args.report is not None:
            save_report(args.report, report_data(report))
        if args.save_policy is not None:
            with open(args.save_policy, "w", encoding="utf-8") as file:
                file.write(report_policy(report_data(report)))
        return _done(report)


def _check_outputs(args: argparse.Namespace) -> None:
    """Before the work: a report or a policy that can't be written, or that would take a model's place."""
    if args.report is not None:
        report_kind(args.report)
    if args.save_policy is not None and not args.save_policy.endswith(".toml"):
        raise ValueError(f"{args.save_policy}: a policy is written as .toml")
    inputs = [path for path in (args.source, args.destination, args.policy, args.calibration) if path is not None]
    for path in filter(None, (args.report, args.save_policy)):
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            raise ValueError(f"{path}: there is no folder {folder}; make it first")
        taken = next((one for one in inputs if same_file(one, path)), None)
        if taken is not None and not (path == args.save_policy and taken == args.policy):
            raise ValueError(f"{path}: would overwrite {taken}; give another name")


def _craft(args: argparse.Namespace) -> Craft:
    calibration = None if args.calibration is None else read_calibration(args.calibration)
    if args.rounding == ROUNDING[0] and args.rounding_seconds is not None:
        raise ValueError("--rounding-seconds limits --rounding feedback, which is not asked for")
    rounding = None if args.rounding == ROUNDING[0] else Rounding(args.rounding_seconds)
    return Craft(args.compute, calibration, args.smooth, rounding)


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
