"""Getting a file from Hugging Face into ComfyUI's folders: resumed where it stopped, checked, never twice."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..files.errors import FileError, OutputError

# Repository, revision, and the file's path there.
_ADDRESS = r"^https://huggingface\.co/([^/]+/[^/]+)" + r"/resolve/([^/]+)/(.+?)(?:\?.*)?$"
# Partial files wait here, on the same disk as the models, until the next try.
WAITING = ".nativedit-download"
_SHA256 = r"^[0-9a-f]{64}$"


def fetch(
    url: str,
    destination: Path,
    *,
    endpoint: str | None = None,  # another address of the hub (tests, mirrors); None = huggingface_hub's own
    progress: Callable[[int, int], None] | None = None,  # (done, in all) while the checksum is computed
) -> Path:
    """Downloads a file to its destination, which is returned, unless it is there already.

    Raises FileError when there is no such address, no network, or a wrong checksum; OutputError when the disk is full;
    ImportError when the library of the hub is not installed.
    """
    if destination.exists():
        return destination
    found = re.match(_ADDRESS, url)
    if found is None:
        raise FileError(url, "is no address of a file on Hugging Face; download it by hand")
    repository, revision, name = found.groups()
    try:
        import huggingface_hub
        from huggingface_hub.file_download import http_get
    except ImportError:
        raise ImportError("downloading needs the package huggingface_hub: pip install huggingface_hub") from None
    address = huggingface_hub.hf_hub_url(repository, name, revision=revision, endpoint=endpoint)
    try:
        metadata = huggingface_hub.get_hf_file_metadata(address)
        # The library itself no longer goes on where an earlier process stopped; its http_get does.
        partial = _partial(destination, metadata.etag)
        with open(partial, "ab") as file:
            have = file.tell()
            if metadata.size is None or have < metadata.size:
                headers = huggingface_hub.utils.build_hf_headers()
                http_get(address, file, resume_size=have, headers=headers, expected_size=metadata.size)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _explained(url, destination, error) from error
    except ValueError as error:
        raise FileError(url, f"can't be downloaded: {_first_line(error)}") from error
    except Exception as error:
        # Which class a failed connection raises depends on the HTTP library that huggingface_hub uses.
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise
        problem = f"no connection: {_first_line(error)}; try again later, it goes on where it stopped"
        raise FileError(url, problem) from error
    _check(partial, metadata, url, progress)
    os.replace(partial, destination)
    with suppress(OSError):  # another download may be waiting in it
        partial.parent.rmdir()
    return destination


def _partial(destination: Path, etag: str | None) -> Path:
    """Where the bytes wait; another version of the file has another name."""
    waiting = destination.parent / WAITING
    waiting.mkdir(parents=True, exist_ok=True)
    version = hashlib.sha256((etag or "").encode()).hexdigest()[:16]
    return waiting / f"{destination.name}.{version}.incomplete"


def _check(got: Path, metadata, url: str, progress: Callable[[int, int], None] | None) -> None:
    """Large files are named by their SHA-256 on the hub. A file that differs is removed. Raises FileError."""
    wanted, size = metadata.etag or "", got.stat().st_size
    if metadata.size is not None and size != metadata.size:
        got.unlink()
        raise FileError(url, f"came as {size:,} bytes, expected were {metadata.size:,}; try again")
    if not re.match(_SHA256, wanted):
        return
    digest, done = hashlib.sha256(), 0
    with open(got, "rb") as file:
        while block := file.read(8 << 20):
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, size)
    if digest.hexdigest() != wanted:
        got.unlink()
        raise FileError(url, "came with a wrong checksum and was removed: a damaged download; try again")


def _explained(url: str, destination: Path, error: OSError) -> FileError:
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
        return OutputError(destination, "the disk is full; free some space, the download goes on where it stopped")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return OutputError(destination, "no permission to write here")
    return FileError(url, f"can't be downloaded: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
