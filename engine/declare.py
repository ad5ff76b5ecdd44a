"""How the engine's own nodes are declared: with the same schema classes as the pack's nodes, always the stand-in.

The module is looked up by its dotted name when the engine starts, as the class paths on cards are; so are the pack's
nodes. The engine runs them and knows nothing else of them.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

from ..supported_models import import_dotted

__all__ = ["engine_host", "io", "node_classes"]

_ROOT = __package__.rpartition(".")[0]

io: ModuleType = importlib.import_module(f"{_ROOT}.nodes._schema")

# Modules of this folder with a list NODES.
_OWN = ("nodes_loaders", "nodes_conditioning", "nodes_latent", "nodes_sampling", "nodes_image", "nodes_utility")


@functools.cache
def node_classes() -> dict[str, type]:
    """class_type -> node class, the engine's own and the pack's."""
    from ..host import current_host

    current_host()  # schemas list files, so they can only be read while a host is set
    classes = list(import_dotted(".nodes:NODES"))
    for name in _OWN:
        classes += importlib.import_module(f".{name}", __package__).NODES
    return {cls.define_schema().node_id: cls for cls in classes}


def engine_host() -> Any:
    """The running EngineHost, for the engine's own nodes."""
    from ..host import current_host

    return current_host()
