"""Full-size key sets of many models: ComfyUI 0.33.0's own modules and diffusers 0.42.1's classes.

`data/key_layouts.json` holds, per layout, [key, shape] or [key with `#`, shape, block numbers] entries.
"""

from __future__ import annotations

import functools
import json

from support import DATA

Shapes = dict[str, tuple[int, ...]]

# Row of the table -> the card it belongs to. Rows that are missing here belong to no card.
CARDS = {
    "z_image": "z_image",
    "qwen_image": "qwen_image",
    "flux_dev": "flux",
    "flux_schnell": "flux",
    "flux2_dev": "flux2",
    "flux2_klein_4b": "flux2",
    "flux2_klein_9b": "flux2",
    "chroma": "chroma",
    "wan21_t2v_14b": "wan",
    "wan21_t2v_1_3b": "wan",
    "wan21_i2v_14b": "wan",
    "wan22_i2v_14b": "wan",
    "wan22_ti2v_5b": "wan",
    "krea2": "krea2",
    "ernie_image": "ernie_image",
    "lumina2": "lumina2",
    "sd35_large": "sd3",
    "sd35_medium": "sd3",
    "minimax_h3": "minimax_h3",
}


@functools.cache
def _packed() -> dict[str, list]:
    return json.loads((DATA / "key_layouts.json").read_text(encoding="utf-8"))


def names() -> list[str]:
    """ "flux_dev.comfy", "flux_dev.diffusers", ..."""
    return list(_packed())


@functools.cache
def _layout(name: str) -> Shapes:
    shapes: Shapes = {}
    for key, shape, *blocks in _packed()[name]:
        if not blocks:
            shapes[key] = tuple(shape)
            continue
        for span in blocks[0].split(","):
            first, last = map(int, span.split("-"))
            shapes.update({key.replace("#", str(number), 1): tuple(shape) for number in range(first, last + 1)})
    return shapes


def layout(name: str) -> Shapes:
    """Key -> shape, without a prefix."""
    return dict(_layout(name))


def written(row: str) -> Shapes:
    """ComfyUI's layout of a row, in the spelling that every supported version reads."""
    return layout(f"{row}.comfy_scale" if f"{row}.comfy_scale" in _packed() else f"{row}.comfy")
