"""Lines of text as pictures, and pictures as PNG files, with Pillow."""

from __future__ import annotations

import io

import numpy as np


def rasterise(text: str) -> np.ndarray:
    """Coverage [height, width] from 0 to 1 of a line of text in Pillow's own font."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default()
    _, _, right, bottom = font.getbbox(text or " ")
    image = Image.new("L", (max(round(right), 1), max(round(bottom) + 2, 14)))
    ImageDraw.Draw(image).text((0, 0), text, fill=255, font=font)
    return np.asarray(image, dtype=np.float32) / 255.0


def png(pixels: np.ndarray) -> bytes:
    """pixels: [height, width, 3] from 0 to 1."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray((pixels.clip(0, 1) * 255).round().astype(np.uint8)).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
