"""What a policy's keys may hold: a mistake in a hand-written file is named before any layer is looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["check_values", "strings"]


def strings(value: Any) -> tuple[str, ...] | None:
    """A text is a list of one; None for what is neither a text nor a list of texts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return tuple(value)
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


_TEXTS = (lambda value: strings(value) is not None, "a text or a list of texts")
_COUNT = (_is_count, "a whole number of at least 0")
_BUDGET = (lambda value: isinstance(value, str) or _is_amount(value), 'a number or a text such as "6GB" or "35dB"')
_EXPECTED = {
    "format": (lambda value: isinstance(value, str), "a text"),
    "include": _TEXTS,
    "exclude": _TEXTS,
    "formats": _TEXTS,
    "keep_edges": _COUNT,
    "min_weights": _COUNT,
    "max_error": (_is_amount, "a number of at least 0"),
    "target_size": _BUDGET,
    "min_sqnr": _BUDGET,
    "layers": (lambda value: isinstance(value, list | tuple), "[[layers]] tables"),
}


def check_values(policy: Mapping[str, Any], name: str) -> None:
    """Raises ValueError with the key, what it holds and what it may hold."""
    for key, value in policy.items():
        fits, expected = _EXPECTED[key]
        if value is not None and not fits(value):
            raise ValueError(f"policy {name}: {key} = {value!r} is not possible; expected {expected}")
    for entry in policy.get("layers") or ():
        if not isinstance(entry, Mapping) or set(entry) != {"match", "format"}:
            raise ValueError(f"policy {name}: every [[layers]] table needs match and format, found {entry!r}")
        if strings(entry["match"]) is None or not isinstance(entry["format"], str):
            raise ValueError(
                f"policy {name}: [[layers]] {dict(entry)!r} is not possible; match is a text or a list of texts, "
                "format is a text"
            )
