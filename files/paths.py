"""Where a file may go: inside its folder, and never onto its own source."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from .errors import OutputError, UnsafePath

__all__ = ["contained", "refuse_same_file", "safe_parts", "same_file"]

# Windows gives these names to devices, with any extension, in any folder.
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$", "clock$"]
    + [f"{port}{number}" for port in ("com", "lpt") for number in "0123456789\u00b9\u00b2\u00b3"]
)


def safe_parts(relative: str | os.PathLike, root: str | os.PathLike) -> list[str]:
    """The folders and file name of a relative path; ``\\`` separates as ``/`` does.

    What would be dangerous on any operating system is refused on all of them, so that a graph means the same
    everywhere. Raises UnsafePath (``root`` is only named in the message).
    """
    text = os.fspath(relative)
    if not text.strip():
        raise UnsafePath(text, "an empty path; give a file name")
    if any(char < " " for char in text):
        raise UnsafePath(repr(text), "a path with control characters")
    if re.match(r"[/\\]|[A-Za-z]:", text):
        drive = f"; {text[:2]!r} names a drive of Windows" if text[1:2] == ":" else ""
        raise UnsafePath(text, f"an absolute path{drive}; give one relative to {os.fspath(root)}")
    parts = [part for part in re.split(r"[/\\]", text) if part not in ("", ".")]
    for part in parts:
        if part == "..":
            raise UnsafePath(text, f"leaves {os.fspath(root)} through '..'")
        if refused := re.search(r'[<>:"|?*]', part):
            raise UnsafePath(text, f"{part!r} is not a file name on every operating system: it holds {refused[0]!r}")
        if part != part.rstrip(" ."):
            raise UnsafePath(text, f"{part!r} ends with a dot or a space, which Windows leaves off a file name")
        if part.split(".")[0].rstrip().lower() in _DEVICES:
            raise UnsafePath(text, f"{part!r} is the name of a device on Windows")
    if not parts:
        raise UnsafePath(text, "names no file")
    return parts


def contained(root: str | os.PathLike, relative: str | os.PathLike) -> Path:
    """``root / relative`` with every symlink resolved, refused unless it stays inside ``root``. Raises UnsafePath.

    ``relative`` is what a workflow, a file or a text field holds; see `safe_parts` for what it may be.
    """
    parts = safe_parts(relative, root)
    base = Path(os.path.realpath(root))
    target = Path(os.path.realpath(base.joinpath(*parts)))
    if base != target and base not in target.parents:
        raise UnsafePath(os.fspath(relative), f"a link on the way leads out of {os.fspath(root)}")
    return target


def same_file(first: str | os.PathLike, second: str | os.PathLike) -> bool:
    """Whether two paths are one file: through symlinks, hard links, or a file system that ignores case."""
    try:
        return os.path.samefile(first, second)
    except OSError:
        return os.path.normcase(os.path.realpath(first)) == os.path.normcase(os.path.realpath(second))


def refuse_same_file(target: str | os.PathLike, sources: Iterable[str | os.PathLike]) -> None:
    """Raises OutputError when ``target`` is one of ``sources``."""
    for source in sources:
        if same_file(target, source):
            raise OutputError(target, f"is the source itself ({os.fspath(source)}); write to another name")
