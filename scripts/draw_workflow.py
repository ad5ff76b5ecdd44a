"""Draws a workflow's graph as the thumbnail of an example whose model is too large to make a picture with here.

python scripts/draw_workflow.py example_workflows/prx.json    # writes example_workflows/prx.jpg
python scripts/draw_workflow.py example_workflows/compare_models.json --result picture.png    # shown in its last node
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

WIDTH, MARGIN, TITLE, SLOT = 1200, 30, 26, 18
BACKGROUND, BOX, HEAD, TEXT, QUIET = "#1e1e1e", "#353535", "#4a4a4a", "#eeeeee", "#a8a8a8"
WIRES = {"MODEL": "#b39ddb", "CLIP": "#ffd54f", "CONDITIONING": "#ffa726", "LATENT": "#f06292", "VAE": "#ef5350"}
WIRE = "#64b5f6"


def draw(graph: dict, result: Image.Image | None = None) -> Image.Image:
    """The nodes of a workflow in UI format where the editor shows them, their wires and their widgets' values.

    result: the picture that its preview or save node shows."""
    nodes = {node["id"]: node for node in graph["nodes"] if node["type"] not in ("MarkdownNote", "Note")}
    right = max(node["pos"][0] + node["size"][0] for node in nodes.values())
    bottom = max(node["pos"][1] + node["size"][1] for node in nodes.values())
    scale = (WIDTH - 2 * MARGIN) / right
    image = Image.new("RGB", (WIDTH, round(bottom * scale) + 2 * MARGIN + TITLE), BACKGROUND)
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(13)

    def place(node: dict) -> tuple[float, float, float, float]:
        left, top = (MARGIN + value * scale for value in node["pos"])
        return left, top, left + node["size"][0] * scale, top + node["size"][1] * scale + TITLE

    for _, source, out, target, into, kind in graph["links"]:
        x0, y0 = place(nodes[source])[2], place(nodes[source])[1] + TITLE + SLOT * (out + 0.5)
        x1, y1 = place(nodes[target])[0], place(nodes[target])[1] + TITLE + SLOT * (into + 0.5)
        bend = max(30.0, (x1 - x0) / 2)
        points = [_bezier(t / 24, x0, y0, x0 + bend, x1 - bend, x1, y1) for t in range(25)]
        canvas.line(points, fill=WIRES.get(kind, WIRE), width=3)
    for node in nodes.values():
        left, top, right, bottom = place(node)
        canvas.rounded_rectangle((left, top, right, bottom), 8, fill=BOX)
        canvas.rounded_rectangle((left, top, right, top + TITLE), 8, fill=HEAD)
        canvas.text((left + 10, top + 5), node["type"], fill=TEXT, font=font)
        slots = max(len(node["inputs"]), len(node["outputs"])) if node["inputs"] else 0
        lines = []
        for value in node.get("widgets_values") or ():
            lines += textwrap.wrap(str(value), int((right - left) / 8)) or [""]
        for index, line in enumerate(lines):
            y = top + TITLE + SLOT * (slots + index) + 4
            if y + SLOT <= bottom:
                canvas.text((left + 12, y), line, fill=QUIET, font=font)
        if result is not None and node["type"] in ("PreviewImage", "SaveImage"):
            top += TITLE + SLOT * (slots + len(lines)) + 4
            room = min((right - left - 16) / result.width, (bottom - top - 8) / result.height)
            size = (round(result.width * room), round(result.height * room))
            resample = Image.Resampling.NEAREST if room > 2 else Image.Resampling.LANCZOS
            image.paste(result.convert("RGB").resize(size, resample), (round((left + right - size[0]) / 2), round(top)))
    return image


def _bezier(t: float, x0: float, y0: float, xa: float, xb: float, x1: float, y1: float) -> tuple[float, float]:
    a, b, c, d = (1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3
    return a * x0 + b * xa + c * xb + d * x1, (a + b) * y0 + (c + d) * y1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflows", nargs="+", type=Path)
    parser.add_argument("--result", type=Image.open, help="a picture for the node that shows the result")
    arguments = parser.parse_args()
    for path in arguments.workflows:
        draw(json.loads(path.read_text(encoding="utf-8")), arguments.result).save(path.with_suffix(".jpg"), quality=88)
