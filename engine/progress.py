"""What a run shows while it works: a line per node and a bar for what takes long, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Bar", "Progress"]


class Bar:
    """Progress within one node. ``to(done, total)`` moves it; nothing is shown without a terminal."""

    def __init__(self, shown: Any = None):
        self._shown = shown

    def to(self, done: int, total: int | None = None) -> None:
        if self._shown is not None:
            if total is not None:
                self._shown.total = total
            self._shown.update(done - self._shown.n)


@dataclass
class Progress:
    """lines: a line for each node; bars: tqdm's bars, for a terminal."""

    lines: bool = False
    bars: bool = False
    notes: list[str] = field(default_factory=list)

    @classmethod
    def for_terminal(cls) -> Progress:
        terminal = sys.stderr is not None and sys.stderr.isatty()
        return cls(lines=True, bars=terminal)

    def node(self, number: int, total: int, name: str, note: str = "") -> None:
        if self.lines:
            self.say(f"[{number}/{total}] {name}{note}")

    def note(self, text: str) -> None:
        """A fact that the user should know; kept in ``notes`` for the result as well."""
        self.notes.append(text)
        if self.lines:
            self.say(f"  {text}")

    def say(self, text: str) -> None:
        if sys.stderr is not None:
            encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
            print(text.encode(encoding, "replace").decode(encoding), file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, total: int, title: str, unit: str = "it") -> Iterator[Bar]:
        if not self.bars:
            yield Bar()
            return
        from tqdm import tqdm

        scaled = unit == "B"
        with tqdm(total=total, desc=title, unit=unit, unit_scale=scaled, leave=not scaled, file=sys.stderr) as shown:
            yield Bar(shown)
