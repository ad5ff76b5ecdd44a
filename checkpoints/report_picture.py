"""A quantization's report as a picture: size by format, error by layer, blocks, and the layers that lost most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .picture import WIDTH, Canvas, Rasteriser, colour_of
from .quant_report import KEPT
from .report_figures import Layer, blocks, decibels, headline, in_order, shares, short, size, wish

__all__ = ["colour_of_format", "picture_of_report", "picture_of_reports"]

MARGIN, ROW = 24, 20
INK, SOFT, FAINT = (0.92, 0.93, 0.95), (0.62, 0.65, 0.70), (0.24, 0.26, 0.30)
BETTER, WORSE = (0.36, 0.76, 0.45), (0.95, 0.40, 0.35)
_MOST_BLOCKS = 64
_WORST = 12
_CHART = 220
_AXIS = 46


def colour_of_format(name: str) -> tuple[float, float, float]:
    if name == KEPT:
        return 0.50, 0.54, 0.60
    # Rotated int8 is a shade of its own beside int8 without a rotation.
    if name.startswith("int8_tensorwise:convrot"):
        return 0.36, 0.76, 0.45
    if name.startswith("int8_tensorwise"):
        return 0.68, 0.82, 0.36
    return (0.36, 0.37, 0.40) if name.startswith("other") else colour_of(name)


def picture_of_report(data: Mapping[str, Any], text: Rasteriser) -> np.ndarray:
    """[height, WIDTH, 3] from 0 to 1."""
    formats, rows = shares(data), blocks(data["layers"], _MOST_BLOCKS)
    worst = _worst(data["layers"]) if data["measured"] else []
    height = 2 * MARGIN + 112 + ROW * (len(formats) + len(rows) + 3)
    height += _CHART + 64 if data["measured"] else 0
    height += ROW * (len(worst) + 2) if worst else 0
    canvas = Canvas(height, text)
    y = _head(canvas, MARGIN, data)
    y = _sizes(canvas, y, data)
    if data["measured"]:
        y = _errors(canvas, y, in_order(data["layers"]))
    y = _blocks(canvas, y, rows, data["measured"])
    if worst:
        y = _table(canvas, y + 10, worst)
    return canvas.pixels[: math.ceil(y) + MARGIN]


def _head(canvas: Canvas, y: int, data: Mapping[str, Any]) -> int:
    canvas.write(
        MARGIN, y, f"{data['source']} quantized" + (f" as {data['destination']}" if data["destination"] else "")
    )
    canvas.write(MARGIN, y + 22, headline(data))
    canvas.write(MARGIN, y + 44, f"Budget: {wish(data)}" if wish(data) else f"Format: {data['format']}", SOFT)
    return y + 74


def _sizes(canvas: Canvas, y: int, data: Mapping[str, Any]) -> int:
    """One bar of the file's bytes, and its legend."""
    found = shares(data)
    total = max(sum(share.nbytes for share in found), 1)
    x = float(MARGIN)
    for share in found:
        width = share.nbytes / total * (WIDTH - 2 * MARGIN)
        canvas.box(x, y, max(width - 1, 1), 24, colour_of_format(share.format))
        x += width
    y += 34
    for share in found:
        canvas.box(MARGIN, y + 2, 12, 12, colour_of_format(share.format))
        canvas.write(MARGIN + 20, y, short(share.format), INK, 400)
        layers = "" if not share.layers else f"{share.layers} layer{'s' if share.layers > 1 else ''}"
        canvas.write(MARGIN + 430, y, layers, SOFT)
        canvas.write(MARGIN + 540, y, size(share.nbytes), SOFT)
        canvas.write(MARGIN + 650, y, f"{100 * share.nbytes / total:.1f}%", SOFT)
        y += ROW
    return y + 14


def _errors(canvas: Canvas, y: int, layers: Sequence[Layer]) -> int:
    """A column per layer in the model's order: decibels upwards; kept layers are marks at the top."""
    values = [layer["sqnr"] for layer in layers if layer.get("sqnr") is not None]
    top = max(10 * math.ceil(max(values, default=40) / 10), 30)
    canvas.write(
        MARGIN, y, "Signal to noise of each layer in decibels, in the model's order; marks on top are kept layers"
    )
    y += 28
    left, room = MARGIN + _AXIS, WIDTH - 2 * MARGIN - _AXIS
    base = y + _CHART
    for mark in range(0, top + 1, 10):
        line = base - mark / top * (_CHART - 12)
        canvas.box(left, line, room, 1, FAINT)
        canvas.write(MARGIN, round(line) - 7, f"{mark} dB" if mark in (0, top) else str(mark), SOFT)
    step = room / max(len(layers), 1)
    for place, layer in enumerate(layers):
        x = left + place * step
        width = max(step - (1 if step >= 3 else 0), 1)
        value = layer.get("sqnr")
        if value is None:
            canvas.box(x, base - _CHART, width, 6, colour_of_format(KEPT))
            continue
        tall = max(min(value, top), 0.0) / top * (_CHART - 12)
        canvas.box(x, base - tall, width, tall, colour_of_format(layer["format"]))
    _ticks(canvas, base, left, step, layers)
    return base + 30


def _ticks(canvas: Canvas, base: int, left: float, step: float, layers: Sequence[Layer]) -> None:
    """Where blocks begin; names as far as there is room for them."""
    free, last = 0.0, None
    for place, layer in enumerate(layers):
        if layer["block"] == last:
            continue
        last, x = layer["block"], left + place * step
        if x < free:
            continue
        name = last or "outside blocks"
        room = 7 * len(name) + 14
        if x + room > WIDTH - MARGIN and free:
            continue
        canvas.box(x, base, 1, 5, SOFT)
        canvas.write(round(x) + 3, base + 6, name, SOFT)
        free = x + room


def _blocks(canvas: Canvas, y: int, rows: Sequence[Any], measured: bool) -> int:
    canvas.write(MARGIN, y, "Blocks: stored bytes by format" + (", and signal to noise of each" if measured else ""))
    y += 26
    label, tail = 260, 190
    most = max((row.nbytes for row in rows), default=1) or 1
    room = WIDTH - 2 * MARGIN - label - tail
    for row in rows:
        canvas.write(MARGIN, y, row.name, INK, label - 12)
        x = float(MARGIN + label)
        for layer in row.layers:
            width = layer["bytes_after"] / most * room
            canvas.box(x, y + 2, width - (1 if width > 3 else 0), ROW - 5, colour_of_format(layer["format"]))
            x += width
        canvas.write(WIDTH - MARGIN - tail + 12, y, size(row.nbytes), SOFT)
        if measured:
            canvas.write(WIDTH - MARGIN - 84, y, decibels(row.sqnr), SOFT)
        y += ROW
    return y


def _worst(layers: Sequence[Layer]) -> list[Layer]:
    changed = [layer for layer in layers if layer.get("noise")]
    return sorted(changed, key=lambda layer: (-layer["noise"], layer["name"]))[:_WORST]


def _table(canvas: Canvas, y: int, worst: Sequence[Layer]) -> int:
    noise = sum(layer["noise"] for layer in worst)
    canvas.write(MARGIN, y, f"The {len(worst)} layers with most of the noise" if noise else "", INK)
    y += 26
    for layer in worst:
        canvas.box(MARGIN, y + 2, 12, 12, colour_of_format(layer["format"]))
        canvas.write(MARGIN + 20, y, layer["name"], INK, 430)
        canvas.write(MARGIN + 460, y, short(layer["format"]), SOFT, 330)
        canvas.write(MARGIN + 800, y, size(layer["bytes_after"]), SOFT)
        canvas.write(WIDTH - MARGIN - 84, y, decibels(layer["sqnr"]), SOFT)
        y += ROW
    return y


# ---- two reports --------------------------------------------------------------------------------------------------


def picture_of_reports(first: Mapping[str, Any], second: Mapping[str, Any], text: Rasteriser) -> np.ndarray:
    """Both size bars, then a column per layer that both have: decibels gained (up) or lost (down) from A to B."""
    theirs = {layer["name"]: layer for layer in second["layers"]}
    pairs = [(layer, theirs[layer["name"]]) for layer in in_order(first["layers"]) if layer["name"] in theirs]
    pairs = [(a, b) for a, b in pairs if "signal" in a and "signal" in b]
    legend = len(shares(first)) + len(shares(second))
    canvas = Canvas(2 * MARGIN + 2 * 122 + ROW * (legend + _WORST + 3) + _CHART + 100, text)
    y = MARGIN
    for letter, data in (("A", first), ("B", second)):
        canvas.write(MARGIN, y, f"{letter}: {data['destination'] or data['source']}")
        canvas.write(MARGIN + 20, y + 22, headline(data) + (f"; budget: {wish(data)}" if wish(data) else ""), SOFT)
        y = _sizes(canvas, y + 48, data)
    if pairs:
        y = _differences(canvas, y, pairs)
    return canvas.pixels[: math.ceil(y) + MARGIN]


# A layer that is kept has no error; it is drawn as if it had this many decibels.
EXACT = 60.0


def gain(first: Layer, second: Layer) -> float:
    """Decibels that the layer has more in the second; an exact one counts as 60, or as the better of both."""
    values = [EXACT if layer["sqnr"] is None else layer["sqnr"] for layer in (first, second)]
    return values[1] - values[0]


def _differences(canvas: Canvas, y: int, pairs: Sequence[tuple[Layer, Layer]]) -> int:
    gains = [gain(a, b) for a, b in pairs]
    reach = max(10.0, 10.0 * math.ceil(max(map(abs, gains)) / 10))
    canvas.write(MARGIN, y, "Decibels that each layer gains (up) or loses (down) from A to B, in the model's order")
    y += 28
    left, room, half = MARGIN + _AXIS, WIDTH - 2 * MARGIN - _AXIS, _CHART / 2
    middle = y + half
    for mark in (-reach, -reach / 2, 0, reach / 2, reach):
        line = middle - mark / reach * half
        canvas.box(left, line, room, 1, SOFT if mark == 0 else FAINT)
        canvas.write(MARGIN, round(line) - 7, f"{mark:+.0f}" if mark else "0 dB", SOFT)
    step = room / len(pairs)
    for place, value in enumerate(gains):
        tall = abs(value) / reach * half
        x, width = left + place * step, max(step - (1 if step >= 3 else 0), 1)
        if tall >= 0.5:
            canvas.box(x, middle - tall if value > 0 else middle + 1, width, tall, BETTER if value > 0 else WORSE)
    y += _CHART
    _ticks(canvas, y, left, step, [a for a, _ in pairs])
    y += 34
    changed = sorted(zip(gains, pairs, strict=True), key=lambda item: -abs(item[0]))[:_WORST]
    changed = [item for item in changed if abs(item[0]) >= 0.05]
    canvas.write(MARGIN, y, "The largest differences" if changed else "No layer differs")
    y += 26
    for value, (a, b) in changed:
        canvas.write(MARGIN, y, a["name"], INK, 330)
        before, after = short(a["format"]), short(b["format"])
        what = before if before == after else f"{before}  to  {after}"
        canvas.write(MARGIN + 345, y, what, SOFT, 520)
        canvas.write(WIDTH - MARGIN - 84, y, f"{value:+.1f} dB", BETTER if value > 0 else WORSE)
        y += ROW
    return y
