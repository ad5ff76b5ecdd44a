"""Two implementations timed in one run: calls alternate, and the ratio is taken of the medians."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch


@dataclass
class Row:
    case: str
    ours_ms: float
    reference_ms: float
    speedup: float
    rel_err: float


def compare(
    case: str,
    ours: Callable[[], torch.Tensor],
    reference: Callable[[], torch.Tensor],
    *,
    seconds: float = 6.0,
    least: int = 5,
) -> Row:
    """Alternate both until ``seconds`` have passed (at least ``least`` calls each), after one warm-up call each.

    With --cpu-time on the command line the processor's time counts, for a machine that does other work meanwhile.
    """
    clock = time.process_time if "--cpu-time" in sys.argv else time.perf_counter
    with torch.inference_mode():
        a, b = ours(), reference()
        error = float((a.double() - b.double()).norm() / b.double().norm())
        times: tuple[list[float], list[float]] = ([], [])
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[0]) < least:
            for call, into in zip((ours, reference), times, strict=True):
                start = clock()
                call()
                into.append(clock() - start)
    one, two = (statistics.median(values) * 1e3 for values in times)
    return Row(case, round(one, 2), round(two, 2), round(two / one, 3), error)


def selected(cases: Sequence[tuple]) -> list[tuple]:
    """The cases, or those whose name (the first entry) holds every word of the command line that is no option.

    --dtype takes the word after it.
    """
    words = [
        word for before, word in zip(sys.argv, sys.argv[1:], strict=False) if word[:1] != "-" and before != "--dtype"
    ]
    return [case for case in cases if all(word in case[0] for word in words)]


def report(title: str, rows: list[Row]) -> None:
    """A table for people; JSON with --json."""
    if "--json" in sys.argv:
        print(json.dumps({"title": title, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    print(f"{title}\ntorch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}\n")
    print("| case | ours ms | reference ms | speedup | rel. difference |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.case} | {row.ours_ms} | {row.reference_ms} | {row.speedup} | {row.rel_err:.1e} |")
