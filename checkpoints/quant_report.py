"""What a quantization decided and what it costs, as data that is kept (JSON), shown (HTML, a picture) and compared."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ..quant.allocation import Choice, Option
from ..quant.measuring import decibels_of
from ..quant.report import QuantizationReport

__all__ = [
    "KEPT",
    "read_report",
    "report_data",
    "report_json",
    "report_kind",
    "report_policy",
    "report_text",
    "write_report",
]

VERSION = 1
KEPT = "kept"


def report_data(report: QuantizationReport) -> dict[str, Any]:
    """Plain values alone; decibels are None where nothing was changed (or nothing measured).

    ``layers`` in the file's order: name, block, shape, dtype, format ("kept" or a recipe), bytes_before, bytes_after,
    signal, noise, sqnr, why, and ``options``: what else was possible, with bytes and sqnr.
    """
    choices = {choice.layer: choice for choice in report.measured.choices} if report.measured is not None else {}
    layers = []
    for decision in report.decisions:
        entry: dict[str, Any] = {
            "name": decision.layer,
            "block": _block_of(decision.layer),
            "shape": list(decision.shape),
            "dtype": decision.dtype,
            "format": _format(decision.recipe),
            "bytes_before": decision.bytes_before,
            "bytes_after": decision.bytes_after,
            "why": decision.why,
        }
        choice = choices.get(decision.layer)
        if choice is not None:
            entry |= {"signal": choice.signal, "noise": choice.option.noise, "sqnr": _sqnr(choice, choice.option)}
            entry["options"] = [
                {
                    "format": _format(option.decision.recipe),
                    "bytes": option.decision.bytes_after,
                    "sqnr": _sqnr(choice, option),
                }
                for option in choice.options
                if option is not choice.option
            ]
        layers.append(entry)
    # A numbered layer on its own is a step of a Sequential, no block.
    counts = Counter(entry["block"] for entry in layers)
    for entry in layers:
        entry["block"] = entry["block"] if counts[entry["block"]] > 1 else ""
    return {
        "nativedit_report": VERSION,
        "source": _name(report.source),
        "destination": _name(report.destination),
        "format": report.format,
        "budget": report.budget,
        "sqnr": _finite(report.sqnr),
        "measured": report.measured is not None,
        "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after,
        "file_size": report.file_size,
        "seconds": round(report.seconds, 1),
        "warnings": list(report.warnings),
        "layers": layers,
        "plan": report.plan,
    }


def report_text(report: QuantizationReport) -> str:
    """For a text field of a graph."""
    return "\n".join([str(report), *report.warnings, "", report.table()])


def report_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def read_report(path: str | os.PathLike) -> dict[str, Any]:
    """A report that was written as JSON. Raises ValueError for another file."""
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if (
        not isinstance(data, dict)
        or data.get("nativedit_report") != VERSION
        or not isinstance(data.get("layers"), list)
    ):
        raise ValueError(
            f"{os.fspath(path)} is no report of a quantization in JSON; write one with "
            "nativedit quantize ... --report FILE.json"
        )
    return data


def report_policy(data: Mapping[str, Any]) -> str:
    """The choice as a TOML policy that makes the same file with ``--policy``."""
    plan = data["plan"]
    budget = data.get("budget") or {}
    wish = ", ".join(f"{key} {value}" for key, value in budget.items() if key in ("target_size", "min_sqnr"))
    lines = [f"# {data['source']}: {wish or data['format']}"]
    lines.append(f"format = {json.dumps(plan['format'])}")
    for table in plan["layers"]:
        lines += ["", "[[layers]]", f"format = {json.dumps(table['format'])}"]
        if isinstance(table["match"], str):
            lines.append(f"match = {json.dumps(table['match'])}")
        else:
            lines += ["match = [", *(f"  {json.dumps(name)}," for name in table["match"]), "]"]
    return "\n".join(lines) + "\n"


def _block_of(layer: str) -> str:
    """ "blocks.3" of "blocks.3.mlp.up", "" outside of repeated blocks."""
    found = re.search(r"(?:^|\.)((?:\w+\.)?\w+\.\d+)\.", f"{layer}.")
    return found[1] if found else ""


def write_report(
    data: Mapping[str, Any],
    path: str | os.PathLike,
    html: Callable[[Mapping[str, Any]], str],
    png: Callable[[Mapping[str, Any]], bytes],
) -> None:
    """As data, as a page or as a picture, by the ending of its name. Raises ValueError for another ending."""
    kind = report_kind(path)
    content = png(data) if kind == "png" else (html(data) if kind == "html" else report_json(data)).encode("utf-8")
    with open(path, "wb") as file:
        file.write(content)


def report_kind(path: str | os.PathLike) -> str:
    """Raises ValueError."""
    ending = os.path.splitext(os.fspath(path))[1].lower().lstrip(".").replace("htm", "html").replace("htmll", "html")
    if ending not in ("json", "html", "png"):
        raise ValueError(f"{os.fspath(path)}: a report is written as .html, .png or .json")
    return ending


def _format(recipe: object | None) -> str:
    return KEPT if recipe is None else str(recipe)


def _sqnr(choice: Choice, option: Option) -> float | None:
    return _finite(decibels_of(choice.signal, option.noise))


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


def _name(path: str) -> str:
    return os.path.basename(os.path.normpath(path)) if path else ""
