"""What can be wrong with a file, as exceptions whose message starts with the file's path."""

from __future__ import annotations

import os

__all__ = ["DamagedFile", "FileError", "NotSafetensors", "OutputError", "UnsafePath"]


class FileError(ValueError):
    """A file can't be used. ``path`` is the file, ``problem`` the sentence; the message holds both."""

    def __init__(self, path: str | os.PathLike, problem: str):
        self.path = os.fspath(path)
        self.problem = problem
        super().__init__(self.path, problem)

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class NotSafetensors(FileError):
    """The file is something else: a pickle, a GGUF, a Git LFS pointer, a web page."""


class DamagedFile(FileError):
    """A safetensors file whose header and content do not fit together."""


class OutputError(FileError):
    """The target can't be written; whatever was there before is untouched."""


class UnsafePath(FileError):
    """A path given by a user or a file that would leave the folder it must stay in."""
