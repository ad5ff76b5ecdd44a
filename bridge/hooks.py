"""Wrapping ComfyUI's functions: once, additively, and so that any other pack's wrapper before or after still works."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

PACK = Path(__file__).resolve().parent.parent
# On the wrapped object's owner and not on the function: a foreign wrapper around ours would hide it there.
MARK = "_nativedit_wrapped"


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """A function of ``owner`` becomes the wrapper, which gets the original before its arguments; once and not twice.

    The original stays within reach, under its name in a dict on the owner.
    """
    originals = owner.__dict__.get(MARK)
    if originals is None:
        originals = {}
        setattr(owner, MARK, originals)
    if name in originals:
        return
    original = originals[name] = operator.attrgetter(name)(owner)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def claim_process(owner: Any) -> Path | None:
    """None for the first copy of this pack that asks in this process, else the folder of the other copy."""
    other = owner.__dict__.setdefault("_nativedit_pack", PACK)
    return None if other == PACK else other


@contextlib.contextmanager
def guarded(what: str) -> Iterator[None]:
    """A part that can't be set up is switched off with one line in the log; ComfyUI starts all the same."""
    try:
        yield
    except Exception as error:  # anything a changed or patched ComfyUI may raise
        log.warning("NativeDiT: %s is switched off in ComfyUI %s: %r", what, comfyui_version(), error)


def comfyui_version() -> str:
    try:
        import comfyui_version as module
    except ImportError:
        return "(of unknown version)"
    return module.__version__


_current_file: contextvars.ContextVar[str | None] = contextvars.ContextVar("nativedit_current_file", default=None)


def current_file() -> str | None:
    """The file that ComfyUI is loading right now; its loaders hand on tensors without saying where they are from."""
    return _current_file.get()


@contextlib.contextmanager
def loading(path: str | None) -> Iterator[None]:
    token = _current_file.set(path)
    try:
        yield
    finally:
        _current_file.reset(token)


def remember_file(owner: Any, name: str, parameter: str) -> None:
    """Let ``current_file`` know the path while ``owner.name`` runs. parameter: the argument (or first one) with it."""

    def wrapper(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get(parameter, args[0] if args else None)
        if isinstance(given, (list, tuple)):
            given = given[0] if len(given) == 1 else None
        with loading(str(given) if given else None):
            return original(*args, **kwargs)

    wrap_once(owner, name, wrapper)
