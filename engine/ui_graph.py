"""UI-format JSON, as ComfyUI's editor saves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import WorkflowError
from .graph import Graph


def graph_from_ui(source: str, data: Mapping[str, Any]) -> Graph:
    raise WorkflowError(
        source,
        [
            "is a workflow as ComfyUI's editor saves it; running needs the API format: open it in ComfyUI and choose "
            "File > Export (API)"
        ],
    )
