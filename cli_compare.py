"""The command line of `parity`: compare."""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path


class Compare:
    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.epilog = (
            "A or B may be an architecture (a tiny model with random weights), a checkpoint, or a folder with a "
            "recording. Without B, A is held against the published class. Exit code 1: the network differs. "
            "A schedule that differs is reported apart."
        )
        parser.add_argument("first", metavar="A", help="ours: an architecture, a checkpoint or a recording's folder")
        parser.add_argument("second", metavar="B", nargs="?", help="what it is held against")
        parser.add_argument(
            "--stages", nargs="+", default=[], metavar="GLOB", help="these stages only, such as 'blocks.0.*'"
        )
        parser.add_argument("--dtype", default="float32", help="compute in float32 (default), bfloat16 or float16")
        parser.add_argument("--seed", type=int, default=0, help="of random weights and inputs")
        parser.add_argument("--sigmas", help="also sample, with these: 1,0.75,0.5,0 or a safetensors file")
        parser.add_argument("--noise", metavar="FILE", help="also sample, from the noise in this safetensors file")
        parser.add_argument("--json", action="store_true", help="print JSON")

    @staticmethod
    def run(args: argparse.Namespace) -> int:
        from .parity.compare import compare

        report = compare(
            args.first,
            args.second,
            stages=args.stages,
            dtype=args.dtype,
            seed=args.seed,
            noise=None if args.noise is None else _one_tensor(args.noise),
            sigmas=None if args.sigmas is None else _sigmas(args.sigmas),
            card_sigmas=_card_sigmas,
        )
        print(report.json() if args.json else report.text())
        return int(report.network_differs)


def _card_sigmas(card, steps: int, latent_height: int, latent_width: int) -> list[float]:
    """What the engine samples at, with the card's own schedule, shift and sampler."""
    from dataclasses import replace

    from .engine.flow import FlowSampling
    from .engine.schedules import sigmas_for

    shift = card.sampling.shift_for(latent_height, latent_width)
    published = card.sampling.published_schedule(steps, shift)
    if published is not None:
        return published
    flow = replace(FlowSampling.of_card(card.sampling), shift=shift)
    return sigmas_for(flow, card.defaults.scheduler, steps, sampler=card.defaults.sampler).tolist()


def _sigmas(text: str) -> list[float]:
    """The sigmas to sample at, two or more and falling. Raises ValueError, FileError."""
    if text.endswith(".safetensors"):
        sigmas = _one_tensor(text).flatten().tolist()
    else:
        try:
            sigmas = [float(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(
                f"--sigmas takes numbers with commas between, or a safetensors file, not {text!r}"
            ) from None
    falling = all(following < sigma for sigma, following in itertools.pairwise(sigmas))
    if len(sigmas) < 2 or not falling or not math.isfinite(sigmas[0]) or sigmas[-1] < 0:
        raise ValueError(f"--sigmas {text}: two or more falling numbers are needed, such as 1,0.75,0.5,0")
    return sigmas


def _one_tensor(path: str):
    """The only tensor of a file. Raises FileError."""
    from .files.errors import FileError
    from .files.source import open_source

    with open_source(Path(path)) as source:
        names = list(source)
        if len(names) != 1:
            raise FileError(path, f"holds {len(names)} tensors ({', '.join(names[:5])}); one is wanted")
        return source.read(names[0])
