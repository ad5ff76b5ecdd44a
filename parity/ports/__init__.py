"""One module per family: ``PORT``, how our module and its reference are compared. Found by listing this folder."""

from __future__ import annotations

import functools
import pkgutil
from importlib import import_module

from ..port import Port

__all__ = ["find_port", "port_of_fixture", "ports"]


@functools.cache
def ports() -> tuple[Port, ...]:
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return tuple(import_module(f".{name}", __name__).PORT for name in names)


def find_port(architecture: str) -> Port:
    """The port of a card. Raises ValueError that lists the cards that have one."""
    for port in ports():
        if architecture in port.tiny:
            return port
    known = ", ".join(sorted(name for port in ports() for name in port.tiny))
    raise ValueError(
        f"nothing says how {architecture!r} is compared; known are {known}. A module in parity/ports teaches it"
    )


def port_of_fixture(architecture: str) -> Port:
    """The port of what a fixture's meta.json calls ``architecture``. Raises ValueError."""
    for port in ports():
        if architecture in port.fixtures or architecture in port.tiny:
            return port
    return find_port(architecture)
