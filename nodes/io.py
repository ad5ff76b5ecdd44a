"""Hands out ``io``: ComfyUI's node schema classes when ComfyUI is running, a small stand-in otherwise.

The only module of ``nodes`` that imports ComfyUI. It asks whether ComfyUI has *already* loaded its API, because merely
standing in ComfyUI's folder (where ``comfy_api`` could be imported) must not start half of ComfyUI.
"""

import sys

if "comfy_api" in sys.modules:
    from comfy_api.latest import io
else:
    from . import _schema as io

__all__ = ["io"]
