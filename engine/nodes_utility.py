"""Values that travel along links, as ComfyUI's nodes of the same names."""

from __future__ import annotations

NODES: list[type] = []
