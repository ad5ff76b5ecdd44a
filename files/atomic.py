"""A file, or a folder, that appears at its place complete, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import OutputError

__all__ = ["AtomicFile", "new_folder"]


class AtomicFile:
    """``with AtomicFile(path) as f: f.write_at(0, data)``: on leaving, synced to disk and put in place of ``path``.

    Until then the data live in an unnamed file of the same folder (Linux: it vanishes with the process, even a
    killed one) or in a hidden ``.partial`` beside the target, removed when anything is raised. A symlink at ``path``
    is kept; the file it points to is replaced. Raises OutputError.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        self._target = os.path.realpath(self.path)
        self._partial: str | None = None
        self._fd: int | None = None

    def __enter__(self) -> AtomicFile:
        folder = os.path.dirname(self._target)
        if os.path.isdir(self._target):
            raise OutputError(self.path, "is a folder; give a file name")
        if not os.path.isdir(folder):
            raise OutputError(self.path, f"can't be written: the folder {folder} does not exist")
        try:
            self._open(folder)
        except OSError as error:
            raise self._explained(error) from error
        return self

    def _open(self, folder: str) -> None:
        if _offers_unnamed_files(folder, self._new_name()):
            self._fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
            return
        partial = self._new_name()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._fd = os.open(partial, flags, 0o666)
        self._partial = partial

    def _new_name(self) -> str:
        folder, name = os.path.split(self._target)
        return os.path.join(folder, f".{name[:80]}.{secrets.token_hex(6)}.partial")

    def reserve(self, size: int) -> None:
        """Refuse at once when the disk has no room for ``size`` bytes. Raises OutputError."""
        free = shutil.disk_usage(os.path.dirname(self._target)).free
        if free < size:
            raise OutputError(
                self.path, f"needs {size / 1e9:.2f} GB but its disk has {free / 1e9:.2f} GB free; nothing was written"
            )

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of ``data`` (bytes or a flat byte view) at ``offset``. Raises OutputError."""
        view = memoryview(data)
        try:
            if hasattr(os, "pwrite"):
                while view:
                    written = os.pwrite(self._fd, view[: 1 << 30], offset)
                    view, offset = view[written:], offset + written
            else:
                os.lseek(self._fd, offset, os.SEEK_SET)
                while view:
                    view = view[os.write(self._fd, view[: 1 << 28]) :]
        except OSError as error:
            raise self._explained(error) from error

    def __exit__(self, kind, value, traceback) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as error:
            raise self._explained(error) from error
        finally:
            self._discard()

    def _publish(self) -> None:
        os.fsync(self._fd)
        if os.path.exists(self._target):
            mode = os.stat(self._target).st_mode & 0o7777
            if hasattr(os, "fchmod"):
                with suppress(PermissionError):
                    os.fchmod(self._fd, mode)
        if self._partial is None:
            partial = self._new_name()
            _name_unnamed(self._fd, partial)
            self._partial = partial
        os.close(self._fd)
        self._fd = None
        _replace(self._partial, self._target)
        self._partial = None
        _sync_folder(os.path.dirname(self._target))

    def _discard(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._partial is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._partial)
            self._partial = None

    def _explained(self, error: OSError) -> OutputError:
        if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
            problem = "the disk is full; nothing was written. Free some space or write to another disk"
        elif error.errno == errno.EFBIG:
            problem = "the file system can't hold a file this large (FAT32?); write to another disk"
        elif isinstance(error, PermissionError) and os.path.exists(self._target):
            problem = (
                "can't be replaced: it is write-protected or another program (a running ComfyUI?) has it open. "
                "Close that program or write to another name"
            )
        elif isinstance(error, PermissionError):
            problem = "no permission to write here"
        else:
            problem = f"can't be written ({error.strerror or error}); nothing was left behind"
        return OutputError(self.path, problem)


@contextmanager
def new_folder(destination: str | os.PathLike) -> Iterator[Path]:
    """A folder that appears at ``destination`` when the block is left without an error. Raises OutputError."""
    target = Path(destination)
    if target.is_file():
        raise OutputError(target, "is a file; give a new folder")
    if target.is_dir() and any(target.iterdir()):
        raise OutputError(target, "is a folder with files in it; give a new folder, so that nothing is mixed up")
    if not target.parent.is_dir():
        raise OutputError(target, f"can't be created: the folder {target.parent} does not exist")
    partial = target.parent / f".{target.name}.{secrets.token_hex(6)}.partial"
    try:
        partial.mkdir()
    except OSError as error:
        raise OutputError(target, f"can't be created ({error.strerror or error})") from error
    try:
        yield partial
        if target.is_dir():
            target.rmdir()
        os.replace(partial, target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OutputError) and Path(error.path).is_relative_to(partial):
            raise OutputError(target / Path(error.path).relative_to(partial), error.problem) from error
        raise


def _replace(partial: str, target: str) -> None:
    # On Windows a virus scanner or the search index opens what is new for a moment, and nobody can rename it meanwhile.
    for pause in (0.05, 0.2, 0.5):
        try:
            os.replace(partial, target)
            return
        except PermissionError:
            time.sleep(pause)
    os.replace(partial, target)


def _name_unnamed(fd: int, path: str) -> None:
    # Python calls linkat with AT_SYMLINK_FOLLOW, which this needs, only when a folder handle is passed.
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{fd}", os.path.basename(path), dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _offers_unnamed_files(folder: str, trial: str) -> bool:
    """Tried once with an empty file: network, FUSE and some overlay mounts refuse one half of it or the other."""
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
    except OSError:
        return False
    try:
        _name_unnamed(fd, trial)
        os.unlink(trial)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _sync_folder(folder: str) -> None:
    # The rename itself must survive a power cut; Windows has no such handle.
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)
