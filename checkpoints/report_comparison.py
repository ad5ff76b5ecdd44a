"""Two reports of one model compared: size, quality, and the layers that were stored otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .report_figures import Layer, decibels, headline, wish

__all__ = ["ReportComparison", "compare_reports"]

_LINES = 60


@dataclass(frozen=True)
class ReportComparison:
    """``pairs``: layers that both have, A's and B's."""

    first: Mapping[str, Any]
    second: Mapping[str, Any]
    pairs: tuple[tuple[Layer, Layer], ...]

    @property
    def changed(self) -> list[tuple[Layer, Layer]]:
        """Stored in another format, the largest change in bytes first."""
        found = [(a, b) for a, b in self.pairs if a["format"] != b["format"]]
        return sorted(found, key=lambda pair: -abs(pair[0]["bytes_after"] - pair[1]["bytes_after"]))

    def text(self) -> str:
        lines = []
        for letter, data in (("A", self.first), ("B", self.second)):
            budget = f"; budget: {wish(data)}" if wish(data) else ""
            lines.append(f"{letter}  {data['destination'] or data['source']}: {headline(data)}{budget}")
        changed = self.changed
        lines.append(f"{len(self.pairs)} layers in both, {len(changed)} in another format")
        for a, b in changed[:_LINES]:
            before, after = (f"{one['format']} {decibels(one.get('sqnr'), one)}".strip() for one in (a, b))
            lines.append(f"{b['bytes_after'] - a['bytes_after']:>+14,} bytes  {a['name']}: {before} -> {after}")
        if len(changed) > _LINES:
            lines.append(f"... and {len(changed) - _LINES} more")
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        both = {}
        for letter, data in (("a", self.first), ("b", self.second)):
            keys = ("source", "destination", "format", "budget", "sqnr", "file_size")
            both[letter] = {key: data.get(key) for key in keys}
        fields = ("format", "bytes_after", "sqnr")
        changed = [
            {"name": a["name"], "a": {key: a.get(key) for key in fields}, "b": {key: b.get(key) for key in fields}}
            for a, b in self.changed
        ]
        return {"nativedit_report_comparison": 1, **both, "layers_in_both": len(self.pairs), "changed": changed}


def compare_reports(first: Mapping[str, Any], second: Mapping[str, Any]) -> ReportComparison:
    """Raises ValueError when the two have no layer in common."""
    theirs = {layer["name"]: layer for layer in second["layers"]}
    pairs = tuple((layer, theirs[layer["name"]]) for layer in first["layers"] if layer["name"] in theirs)
    if not pairs:
        raise ValueError(
            f"the reports on {first['source']} and {second['source']} have no layer in common: not the same model"
        )
    return ReportComparison(first, second, pairs)
