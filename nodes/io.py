"""Hands out the classes of a node's schema: those of ComfyUI when it is running, a small stand-in otherwise.

This is the only module of the nodes that imports ComfyUI. It asks whether ComfyUI has already loaded its interface,
because merely standing in ComfyUI's folder, where that could be imported, must not start half of ComfyUI.
"""

import sys

if "comfy_api" in sys.modules:
    from comfy_api.latest import io
else:
    from . import _schema as io

__all__ = ["io"]
