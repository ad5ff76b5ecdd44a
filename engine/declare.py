"""How the engine's own nodes are declared: with the same schema classes as the pack's nodes, always the stand-in.

The module is looked up by its dotted name when the engine starts, as the class paths on cards are; so are the pack's
nodes. The engine runs them and knows nothing else of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from .. import host as hosts
from ..supported_models import import_dotted
from .model_folders import FileList
from .ui_graph import WidgetInput

__all__ = ["engine_host", "io", "node_classes", "widgets_of"]

_ROOT = __package__.rpartition(".")[0]

io: ModuleType = import_module(f"{_ROOT}.nodes._schema")

# Modules of this folder with a list NODES.
_OWN = ("nodes_loaders", "nodes_conditioning", "nodes_latent", "nodes_sampling", "nodes_image", "nodes_utility")


WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


@functools.cache
def node_classes() -> dict[str, type]:
    """class_type -> node class, the engine's own and the pack's. A class is called as its node."""
    classes = list(import_dotted(".nodes:NODES"))
    for name in _OWN:
        classes += import_module(f".{name}", __package__).NODES
    return {cls.__name__: cls for cls in classes}


def widgets_of(class_type: str) -> list[WidgetInput] | None:
    """The widgets of a node in the editor's order. Needs no host: what files there are does not matter."""
    cls = node_classes().get(class_type)
    if cls is None:
        return None
    with _no_files():
        inputs = cls.define_schema().inputs
    return [
        WidgetInput(item.id, bool(getattr(item, "control_after_generate", False)))
        for item in inputs
        if item.io_type in WIDGET_TYPES and not getattr(item, "force_input", None)
    ]


class _NoFiles:
    name = "engine"

    def list_files(self, folder: str) -> FileList:
        return FileList((), folder)

    def list_model_folders(self) -> list[str]:
        return []

    list_statistics = list_model_folders

    def samplers(self) -> list[str]:
        return []

    schedulers = samplers


@contextmanager
def _no_files() -> Iterator[None]:
    before = hosts._current
    hosts.set_host(_NoFiles())
    try:
        yield
    finally:
        hosts.set_host(before)


def engine_host() -> Any:
    """The running EngineHost, for the engine's own nodes."""
    return hosts.current_host()
