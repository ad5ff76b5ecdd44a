"""Reports as pictures: bars of layers in colours. The text is rasterised by the host, which has fonts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable

import numpy as np

from .comparison import Comparison, decibels
from .inspection import Entry, Inspection

# text -> its coverage, [height, width] from 0 to 1.
Rasteriser = Callable[[str], np.ndarray]

WIDTH = 1024
_MARGIN, _ROW, _LABEL = 24, 20, 260
_BACK, _INK, _FAINT, _ALARM = (0.10, 0.11, 0.13), (0.92, 0.93, 0.95), (0.24, 0.26, 0.30), (0.95, 0.25, 0.25)
_FLOATS = {"F32": (0.55, 0.58, 0.63), "BF16": (0.42, 0.46, 0.52), "F16": (0.36, 0.40, 0.47)}
_FORMATS = (
    ("float8", (0.30, 0.62, 0.92)),
    ("mxfp8", (0.32, 0.78, 0.85)),
    ("nvfp4", (0.68, 0.48, 0.92)),
    ("int8_tensorwise", (0.36, 0.76, 0.45)),
    ("convrot_w4a4", (0.92, 0.70, 0.28)),
    ("asym_w4a8", (0.93, 0.53, 0.62)),
    ("unreadable", _ALARM),
)
_MOST_ROWS = 120


class Canvas:
    """[height, WIDTH, 3] from 0 to 1."""

    def __init__(self, height: int, text: Rasteriser):
        self.pixels = np.empty((height, WIDTH, 3), dtype=np.float32)
        self.pixels[:] = _BACK
        self._text = text

    def box(self, x: float, y: float, width: float, height: float, colour: tuple[float, float, float]) -> None:
        left, right = round(max(x, 0)), round(min(x + max(width, 1), WIDTH))
        self.pixels[round(y) : round(y + height), left:right] = colour

    def write(self, x: int, y: int, text: str, colour: tuple[float, float, float] = _INK, room: int = WIDTH) -> None:
        """One line with its top at y, cut off after ``room`` pixels."""
        mask = self._text(text)[:, : min(room, WIDTH - x)]
        area = self.pixels[y : y + mask.shape[0], x : x + mask.shape[1]]
        mask = mask[: area.shape[0], : area.shape[1], None]
        area[:] = area * (1 - mask) + np.asarray(colour, dtype=np.float32) * mask


def colour_of(name: str) -> tuple[float, float, float]:
    found = next((colour for start, colour in _FORMATS if name.startswith(start)), None)
    return found or _FLOATS.get(name, (0.48, 0.44, 0.40))


def picture_of_file(inspection: Inspection, text: Rasteriser) -> np.ndarray:
    """A bar of formats by size, then a bar per block whose parts are its layers; problems are red."""
    rows = _grouped(_blocks(inspection.entries))
    sizes = inspection.sizes()
    problems = inspection.problems
    lines = [line for problem in problems[:8] for line in textwrap.wrap(problem, 150, subsequent_indent="    ")]
    height = 2 * _MARGIN + 30 * 4 + _ROW * (len(rows) + len(sizes) + len(lines) + 3)
    canvas = Canvas(height, text)
    info, y = inspection.info, _MARGIN
    canvas.write(_MARGIN, y, info.path.replace("\\", "/").rsplit("/", 1)[-1])
    title = info.title + (f": {info.architecture}" if info.architecture else "")
    canvas.write(
        _MARGIN, y + 24, f"{title}, {info.parameters / 1e9:.2f} B parameters, {info.nbytes / 1e9:.2f} GB", _INK
    )
    y += 58
    x, total = float(_MARGIN), max(sum(sizes.values()), 1)
    for name, size in sizes.items():
        width = size / total * (WIDTH - 2 * _MARGIN)
        canvas.box(x, y, width, 22, colour_of(name))
        x += width
    y += 32
    for name, size in sizes.items():
        canvas.box(_MARGIN, y + 3, 12, 12, colour_of(name))
        canvas.write(_MARGIN + 20, y, f"{name}   {size / 1e9:.3f} GB   {100 * size / total:.1f}%")
        y += _ROW
    y += 12
    if problems:
        canvas.write(_MARGIN, y, "1 problem" if len(problems) == 1 else f"{len(problems)} problems", _ALARM)
        for line in lines:
            y += _ROW
            canvas.write(_MARGIN + 20, y, line, _ALARM)
        y += _ROW + 8
    most = max((sum(entry.nbytes for entry in row) for _, row in rows), default=1) or 1
    room = WIDTH - 2 * _MARGIN - _LABEL
    for name, row in rows:
        canvas.write(_MARGIN, y, name, _INK, _LABEL - 12)
        x = float(_MARGIN + _LABEL)
        for entry in row:
            width = entry.nbytes / most * room
            canvas.box(x, y + 2, width - (1 if width > 3 else 0), _ROW - 5, colour_of(entry.format))
            if entry.problem:
                canvas.box(x, y + 2, max(width - 1, 4), 4, _ALARM)
                canvas.box(x, y + _ROW - 7, max(width - 1, 4), 4, _ALARM)
            x += width
        y += _ROW
    return canvas.pixels


def _blocks(entries: Iterable[Entry]) -> list[tuple[str, list[Entry]]]:
    rows: dict[str, list[Entry]] = {}
    for entry in entries:
        rows.setdefault(entry.block or "(outside blocks)", []).append(entry)
    return sorted(rows.items(), key=lambda row: row[0].startswith("("))


def _grouped(rows: list[tuple[str, list[Entry]]]) -> list[tuple[str, list[Entry]]]:
    """Several blocks to a row where a model has more blocks than a picture has room for."""
    per_row = math.ceil(len(rows) / _MOST_ROWS)
    if per_row <= 1:
        return rows
    groups = [rows[start : start + per_row] for start in range(0, len(rows), per_row)]
    return [
        (f"{group[0][0]} to {group[-1][0]}" if len(group) > 1 else group[0][0], [e for _, row in group for e in row])
        for group in groups
    ]


def picture_of_comparison(comparison: Comparison, text: Rasteriser) -> np.ndarray:
    """A bar per changed weight, in the model's order: its signal to noise in decibels, in its format's colour."""
    changed = [found for found in comparison.differences if math.isfinite(found.sqnr)]
    shown = changed
    if len(changed) > _MOST_ROWS:
        worst = set(sorted(range(len(changed)), key=lambda index: changed[index].sqnr)[:_MOST_ROWS])
        shown = [found for index, found in enumerate(changed) if index in worst]
    formats = list(dict.fromkeys(found.format for found in shown))
    canvas = Canvas(2 * _MARGIN + 90 + _ROW * (max(len(shown), 1) + len(formats)), text)
    equal = len(comparison.differences) - len(changed)
    canvas.write(_MARGIN, _MARGIN, f"Signal to noise of {len(changed)} changed weights ({equal} are equal)")
    note = f", the {len(shown)} worst" if len(shown) < len(changed) else ""
    canvas.write(
        _MARGIN,
        _MARGIN + 24,
        f"overall {decibels(comparison.total)}{note}; longer is better: 20 dB are an error of 10%, 40 dB of 1%",
    )
    y, label = _MARGIN + 50, _LABEL + 160
    for name in formats:
        canvas.box(_MARGIN, y + 3, 12, 12, colour_of(name))
        canvas.write(_MARGIN + 20, y, name)
        y += _ROW
    y += 24
    top = max(60.0, *(min(found.sqnr, 120.0) for found in shown)) if shown else 60.0
    room = WIDTH - 2 * _MARGIN - label - 90
    for mark in range(0, int(top) + 1, 20):
        x = _MARGIN + label + mark / top * room
        canvas.box(x, y, 1, _ROW * len(shown) + 4, _FAINT)
        canvas.write(round(x) + 3, y - 18, str(mark), _INK)
    for found in shown:
        canvas.write(_MARGIN, y, found.name.removesuffix(".weight"), _INK, label - 12)
        width = min(max(found.sqnr, 0.0), top) / top * room
        canvas.box(_MARGIN + label, y + 3, width, _ROW - 7, colour_of(found.format))
        canvas.write(_MARGIN + label + round(width) + 6, y, decibels(found.sqnr), _INK)
        y += _ROW
    return canvas.pixels
