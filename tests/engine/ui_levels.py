"""Workflows as ComfyUI's editor saves them, written down briefly."""

from __future__ import annotations

from itertools import count
from typing import Any

SUBGRAPH = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
NESTED = "1f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


class Level:
    """Nodes and links of one level, as the editor writes them."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.links: list[list[Any]] = []
        self._numbers = count(1)

    def add(self, number: int, kind: str, inputs: str = "", outputs: str = "", widgets: Any = (), **more: Any) -> None:
        """inputs, outputs: "model:MODEL clip:CLIP"; a name with * in front is a widget turned into an input."""
        self.nodes.append(
            {
                "id": number,
                "type": kind,
                "mode": 0,
                "inputs": [socket(text) for text in inputs.split()],
                "outputs": [socket(text) for text in outputs.split()],
                "widgets_values": widgets if isinstance(widgets, dict) else list(widgets),
                **more,
            }
        )

    def link(self, start: int, start_slot: int, end: int, end_slot: int, kind: str = "*") -> int:
        number = next(self._numbers)
        self.links.append([number, start, start_slot, end, end_slot, kind])
        return number

    def saved(self, subgraphs: list[dict[str, Any]] = ()) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "links": self.links,
            "definitions": {"subgraphs": list(subgraphs)},
            "version": 0.4,
        }

    def subgraph(self, uuid: str, inputs: str, outputs: str) -> dict[str, Any]:
        keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        return {
            "id": uuid,
            "name": "Inside",
            "nodes": self.nodes,
            "links": [dict(zip(keys, link, strict=True)) for link in self.links],
            "inputs": [socket(text) for text in inputs.split()],
            "outputs": [socket(text) for text in outputs.split()],
        }


def socket(text: str) -> dict[str, Any]:
    name, _, kind = text.lstrip("*").partition(":")
    return {"name": name, "type": kind, "link": None} | ({"widget": {"name": name}} if text[0] == "*" else {})


def of_everything() -> dict[str, Any]:
    """A picture by way of a subgraph, reroutes and primitives in and out of it, muted and bypassed nodes."""
    inner = Level()
    inner.add(1, "Reroute", ":*", ":CLIP")
    text = "clip:CLIP *text:STRING"
    for number, words, mode in ((2, "not this", 0), (3, "not this either", 0), (4, "nobody's", 2)):
        inner.add(number, "CLIPTextEncode", text, "CONDITIONING:CONDITIONING", [words], mode=mode)
        inner.link(1, 0, number, 0)
    inner.add(5, "PrimitiveNode", "", "STRING:STRING", ["a blue square"])
    inner.add(6, "ConditioningZeroOut", "conditioning:CONDITIONING", "CONDITIONING:CONDITIONING", mode=4)
    for link in ((-10, 0, 1, 0), (-10, 1, 2, 1), (5, 0, 3, 1), (3, 0, 6, 0), (2, 0, -20, 0), (6, 0, -20, 1)):
        inner.link(*link)
    both = "positive:CONDITIONING negative:CONDITIONING"
    outer = Level()
    outer.add(1, "UNETLoader", "", "MODEL:MODEL", ["tiny.safetensors", "default"])
    outer.add(2, "NativeDiTLoadTextEncoder", "", "CLIP:CLIP", ["tiny_text.safetensors", "auto", "as stored"])
    outer.add(3, "Reroute", ":*", ":CLIP")
    outer.add(4, SUBGRAPH, text, both, ["a red circle"], title="Prompts")
    outer.add(5, "LoraLoaderModelOnly", "model:MODEL", "MODEL:MODEL", ["gone.safetensors", 1.0], mode=4)
    outer.add(6, "NativeDiTEmptyLatent", "model:MODEL *width:INT", "LATENT:LATENT", [8, 48, 1])
    outer.add(7, "PrimitiveNode", "", "INT:INT", [3, "randomize"])
    outer.add(8, "PrimitiveInt", "", "INT:INT", [64, "fixed"])
    sockets = f"model:MODEL {both} latent_image:LATENT *steps:INT"
    outer.add(9, "KSampler", sockets, "LATENT:LATENT", [42, "fixed", 20, 4.0, "euler", "simple", 1.0])
    outer.add(10, "VAELoader", "", "VAE:VAE", ["pixel_space"])
    outer.add(11, "VAEDecode", "samples:LATENT vae:VAE", "IMAGE:IMAGE")
    outer.add(12, "SaveImage", "images:IMAGE", "", ["everything"])
    outer.add(13, "PreviewImage", "images:IMAGE", "", mode=2)
    for link in ((2, 0, 3, 0), (3, 0, 4, 0), (1, 0, 5, 0), (1, 0, 6, 0), (8, 0, 6, 1), (5, 0, 9, 0), (4, 0, 9, 1)):
        outer.link(*link)
    for link in ((4, 1, 9, 2), (6, 0, 9, 3), (7, 0, 9, 4), (9, 0, 11, 0), (10, 0, 11, 1), (11, 0, 12, 0)):
        outer.link(*link)
    outer.link(11, 0, 13, 0)
    return outer.saved([inner.subgraph(SUBGRAPH, text, both)])
