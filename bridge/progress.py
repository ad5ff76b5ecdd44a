"""The progress bar on a node, and ComfyUI's cancel button."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management
import comfy.utils


def node_progress() -> Callable[[int, int, str], None]:
    """``progress(done, total, what)`` for the node that is running. Raises ComfyUI's interruption when it was asked
    for, which leaves neither file nor memory behind: every writer discards what it has on an exception."""
    bar = comfy.utils.ProgressBar(1)

    def advance(done: int, total: int, what: str = "") -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update_absolute(done, max(total, 1))

    return advance
