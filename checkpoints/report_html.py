"""A quantization's report as one HTML file that needs nothing else: figures as SVG, every layer with its reason."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .quant_report import KEPT, report_policy
from .report_figures import Block, Layer, blocks, decibels, headline, in_order, shares, short, size, wish
from .report_picture import colour_of_format, gain

__all__ = ["html_of_report", "html_of_reports"]

_STYLE = Path(__file__).with_name("report.css")
_PLAN = "plan.toml"
_WITH_THE_PLAN = f"nativedit quantize SOURCE FILE --policy {_PLAN}"
_WIDTH, _HEIGHT, _LEFT = 1040, 240, 44


def html_of_report(data: Mapping[str, Any]) -> str:
    budget = wish(data)
    parts = [
        f"<h1>{_text(data['source'])}</h1>",
        f"<p class=soft>{'quantized as ' + _text(data['destination']) if data['destination'] else 'quantized'}</p>",
        f"<p>{_text(headline(data))}<br>{_text('Budget: ' + budget if budget else 'Format: ' + data['format'])}</p>",
        *(f"<p class=warn>{_text(warning)}</p>" for warning in data["warnings"]),
        _sizes(data),
    ]
    if data["measured"]:
        parts += ["<h2>Signal to noise of each layer</h2>", _errors(in_order(data["layers"]))]
        parts.append(
            "<p class=soft>In decibels, in the model's order; each 6 dB halve the error. Marks on top are layers that "
            "are kept as they were. The model's figure is the power of all its matrices over that of what was changed "
            "in them.</p>"
        )
    parts += ["<h2>Layers, and why</h2>", *(_block(block, data["measured"]) for block in blocks(data["layers"]))]
    if data.get("plan"):
        parts += [
            "<h2>The plan as a policy</h2>",
            f"<p class=soft>Saved as a TOML file it makes the same file again: <code>{_WITH_THE_PLAN}</code></p>"
            f"<pre>{_text(report_policy(data))}</pre>",
        ]
    return _page(f"{data['source']}: quantization", parts)


def html_of_reports(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Two reports side by side: sizes, then each layer's gain in decibels and bytes."""
    parts = ["<h1>Two quantizations</h1>"]
    for letter, data in (("A", first), ("B", second)):
        budget = f"<br><span class=soft>Budget: {_text(wish(data))}</span>" if wish(data) else ""
        parts += [
            f"<h2>{letter}: {_text(data['destination'] or data['source'])}</h2>",
            f"<p>{_text(headline(data))}{budget}",
        ]
        parts.append(_sizes(data))
    theirs = {layer["name"]: layer for layer in second["layers"]}
    pairs = [(layer, theirs[layer["name"]]) for layer in in_order(first["layers"]) if layer["name"] in theirs]
    measured = [(a, b) for a, b in pairs if "signal" in a and "signal" in b]
    if measured:
        parts += ["<h2>Decibels that each layer gains from A to B</h2>", _gains(measured)]
    rows = [_pair(a, b) for a, b in pairs if a["format"] != b["format"] or abs(_gain(a, b)) >= 0.05]
    parts.append(f"<h2>{len(rows)} of {len(pairs)} layers differ</h2>")
    if rows:
        head = (
            "<tr><th>layer<th>A<th class=n>dB<th class=n>size<th>B<th class=n>dB<th class=n>size<th class=n>gain</tr>"
        )
        parts.append(f"<table>{head}{''.join(rows)}</table>")
    for title, own, other in (("A", first, second), ("B", second, first)):
        known = {layer["name"] for layer in other["layers"]}
        names = [layer["name"] for layer in own["layers"] if layer["name"] not in known]
        if names:
            parts.append(f"<h2>Only in {title}</h2><p>{_text(', '.join(names))}</p>")
    return _page("Two quantizations", parts)


def _page(title: str, parts: Sequence[str]) -> str:
    style = _STYLE.read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _text(value: object) -> str:
    return html.escape(str(value))


def _colour(name: str) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour_of_format(name))


def _mark(name: str) -> str:
    return f'<i style="background:{_colour(name)}"></i>{_text(short(name))}'


def _sizes(data: Mapping[str, Any]) -> str:
    found = shares(data)
    total = max(sum(share.nbytes for share in found), 1)
    bar = "".join(
        f'<span style="flex:{share.nbytes / total:.5f};background:{_colour(share.format)}" '
        f'title="{_text(share.format)}: {size(share.nbytes)}"></span>'
        for share in found
    )
    rows = "".join(
        f"<tr><td>{_mark(share.format)}<td class=n>{share.layers or ''}<td class=n>{size(share.nbytes)}"
        f"<td class=n>{100 * share.nbytes / total:.1f}%</tr>"
        for share in found
    )
    head = "<tr><th>format<th class=n>layers<th class=n>size<th class=n>share</tr>"
    return f"<div class=bar>{bar}</div><table>{head}{rows}</table>"


def _errors(layers: Sequence[Layer]) -> str:
    values = [layer["sqnr"] for layer in layers if layer.get("sqnr") is not None]
    top = max(10 * math.ceil(max(values, default=40) / 10), 30)
    step, room = (_WIDTH - _LEFT) / max(len(layers), 1), _HEIGHT - 34
    shapes = [_line(20 + room * (1 - mark / top), f"{mark} dB") for mark in range(0, top + 1, 10)]
    for place, layer in enumerate(layers):
        value = layer.get("sqnr")
        x, width = _LEFT + place * step, max(step * (0.82 if step > 3 else 1), 0.7)
        tall = 6 if value is None else room * max(min(value, top), 0) / top
        y = 4 if value is None else 20 + room - tall
        note = f"{layer['name']}: {layer['format']}, {decibels(value, layer)}, {size(layer['bytes_after'])}"
        shapes.append(_rect(x, y, width, tall, _colour(layer["format"] if value is not None else KEPT), note))
    return _drawing(_HEIGHT, [*shapes, *_ticks(layers, step, 20 + room)])


def _gains(pairs: Sequence[tuple[Layer, Layer]]) -> str:
    gains = [gain(a, b) for a, b in pairs]
    reach = max(10.0, 10.0 * math.ceil(max(map(abs, gains)) / 10))
    step, half = (_WIDTH - _LEFT) / len(pairs), (_HEIGHT - 40) / 2
    middle = 14 + half
    shapes = [
        _line(middle - mark / reach * half, f"{mark:+.0f} dB") for mark in (-reach, -reach / 2, 0, reach / 2, reach)
    ]
    for place, (value, (a, b)) in enumerate(zip(gains, pairs, strict=True)):
        tall = abs(value) / reach * half
        note = f"{a['name']}: {a['format']} to {b['format']}, {value:+.1f} dB"
        colour = "#4fb06a" if value > 0 else "#d9604f"
        width = max(step * (0.82 if step > 3 else 1), 0.7)
        shapes.append(_rect(_LEFT + place * step, middle - tall if value > 0 else middle, width, tall, colour, note))
    return _drawing(_HEIGHT, [*shapes, *_ticks([a for a, _ in pairs], step, middle + half)])


def _drawing(height: float, shapes: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(shapes)}</svg>'


def _rect(x: float, y: float, width: float, height: float, colour: str, note: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{colour}"'
    return f"<rect {place}><title>{_text(note)}</title></rect>"


def _line(y: float, label: str) -> str:
    line = f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
    return f'{line}<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def _ticks(layers: Sequence[Layer], step: float, base: float) -> list[str]:
    """Names of blocks where they begin, as far as there is room."""
    shapes, free, last = [], 0.0, None
    for place, layer in enumerate(layers):
        x = _LEFT + place * step
        name = layer["block"] or "outside blocks"
        if layer["block"] == last or x < free or (x + 6 * len(name) > _WIDTH and free):
            last = layer["block"]
            continue
        last, free = layer["block"], x + 6 * len(name) + 16
        shapes.append(f'<text x="{x:.1f}" y="{base + 13:.1f}">{_text(name)}</text>')
    return shapes


def _block(block: Block, measured: bool) -> str:
    formats = sorted({layer["format"] for layer in block.layers})
    marks = "".join(f"<span>{_mark(name)}</span>" for name in formats)
    total = f"<span>{size(block.nbytes)}</span>" + (f"<span>{decibels(block.sqnr)}</span>" if measured else "")
    head = "<tr><th>layer<th>format<th class=n>before<th class=n>after<th class=n>dB<th>why<th>instead</tr>"
    rows = "".join(_row(layer) for layer in block.layers)
    return f"<details><summary><b>{_text(block.name)}</b>{total}{marks}</summary><table>{head}{rows}</table></details>"


def _row(layer: Layer) -> str:
    options = "<br>".join(
        f"{_text(short(one['format']))}: {size(one['bytes'])}, {decibels(one['sqnr'])}"
        for one in layer.get("options", ())
    )
    shape = " x ".join(map(str, layer["shape"]))
    return (
        f"<tr><td class=l>{_text(layer['name'])}<br><span class=soft>{shape}, {layer['dtype']}</span>"
        f"<td>{_mark(layer['format'])}<td class=n>{size(layer['bytes_before'])}<td class=n>{size(layer['bytes_after'])}"
        f"<td class=n>{decibels(layer.get('sqnr'), layer)}<td>{_text(layer['why'])}<td class=soft>{options}</tr>"
    )


def _gain(first: Layer, second: Layer) -> float:
    return gain(first, second) if "signal" in first and "signal" in second else 0.0


def _pair(first: Layer, second: Layer) -> str:
    value = _gain(first, second)
    cells = "".join(
        f"<td>{_mark(one['format'])}<td class=n>{decibels(one.get('sqnr'), one)}<td class=n>{size(one['bytes_after'])}"
        for one in (first, second)
    )
    change = f"<td class='n {'up' if value > 0 else 'down'}'>{value:+.1f} dB" if "signal" in first else "<td>"
    return f"<tr><td class=l>{_text(first['name'])}{cells}{change}</tr>"
