"""Moves tensors from a source to a writer in pieces: reads ahead, computes, writes behind.

At most a handful of pieces is in memory, so the size of the model does not matter. A piece is a whole tensor up to
`PIECE` bytes, else a run of rows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..files import SafetensorsWriter, Source, TensorInfo
from ..files.dtypes import torch_dtype
from .errors import QuantError

__all__ = ["COPIED", "PIECE", "Meter", "Progress", "RowRun", "Task", "Writing", "copy_tasks", "row_runs", "run_tasks"]

# Bytes of a source tensor held at once.
PIECE = 96 << 20
# Read ahead of the piece that is worked on: so many bytes or one piece, in so many pieces at most.
_AHEAD, _MOST_AHEAD = PIECE // 2, 32
# Of bytes that are only copied: buffers this small are used again instead of being asked of the system anew, which
# takes a third less processor time than a piece of the size above.
COPIED = 16 << 20
# Tiled block scales (nvfp4, mxfp8) come in tiles of 128 rows.
ROW_ALIGNMENT = 128

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Task:
    """``load`` runs in the reading thread; ``handle`` takes its result in the calling thread, in order.

    ``room``: so many bytes of memory are handed to ``load`` to read into, and belong to another task after ``handle``.
    """

    load: Callable[..., Any]
    handle: Callable[[Any], None]
    nbytes: int
    label: str
    room: int = 0


@dataclass(frozen=True)
class RowRun:
    """Rows ``start:stop`` of one matrix: of the tensor itself, or of expert ``expert`` of a bank."""

    start: int
    stop: int
    expert: int = 0


def row_runs(shape: tuple[int, ...], row_bytes: int, piece: int | None = None) -> list[RowRun]:
    """Cuts each matrix of [N, K] or [E, N, K] into runs of at most ``piece`` bytes, aligned to 128 rows."""
    piece = PIECE if piece is None else piece
    rows = shape[-2]
    step = max(ROW_ALIGNMENT, piece // max(row_bytes, 1) // ROW_ALIGNMENT * ROW_ALIGNMENT)
    experts = shape[0] if len(shape) == 3 else 1
    return [
        RowRun(start, min(start + step, rows), expert) for expert in range(experts) for start in range(0, rows, step)
    ]


def read_run(source: Source, info: TensorInfo, run: RowRun, room: torch.Tensor | None = None) -> torch.Tensor:
    """The rows of ``run`` as a 2-D tensor in the stored dtype; in ``room`` (of bytes) where one is given."""
    rows, columns = info.shape[-2:]
    row_bytes = info.nbytes // max(info.numel // max(columns, 1), 1)
    first = (run.expert * rows + run.start) * row_bytes
    raw = source.read_bytes(info.name, first, first + (run.stop - run.start) * row_bytes, room)
    return raw.view(torch_dtype(info.dtype)).reshape(run.stop - run.start, columns)


class Meter:
    """Adds up what has been read and tells the caller's ``progress(done_bytes, total_bytes, what)``."""

    def __init__(self, total: int, progress: Progress | None):
        self.total = total
        self.done = 0
        self._progress = progress

    def add(self, count: int, label: str) -> None:
        self.done += count
        if self._progress is not None:
            self._progress(min(self.done, self.total), self.total, label)


class _Rooms:
    """Memory to read pieces into. New memory comes from the system page by page, which takes four times as long as
    filling it; what was used before does not."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def load(self, task: Task) -> tuple[torch.Tensor | None, Any]:
        if not task.room:
            return None, task.load()
        room = self._take(task.room)
        return room, task.load(room)

    def _take(self, size: int) -> torch.Tensor:
        """The smallest that is large enough, or a new one in the largest one's place."""
        with self._lock:
            self._free.sort(key=torch.Tensor.numel)
            place = next((place for place, room in enumerate(self._free) if room.numel() >= size), -1)
            room = self._free.pop(place) if self._free else None
        if room is None or room.numel() < size:
            room = None  # its memory is free before more is asked for
            room = torch.empty(size, dtype=torch.uint8)
        return room

    def handle(self, task: Task, loaded: tuple[torch.Tensor | None, Any]) -> None:
        room, piece = loaded
        task.handle(piece)
        if room is not None:
            with self._lock:
                self._free.append(room)


def run_tasks(tasks: Iterable[Task], meter: Meter) -> None:
    """Runs the tasks in order, reading ahead. Any exception stops it at once."""
    rooms = _Rooms()
    with ThreadPoolExecutor(1, thread_name_prefix="nativedit-read") as pool:
        waiting: deque[tuple[Task, Future[tuple[torch.Tensor | None, Any]]]] = deque()

        def finish() -> None:
            task, future = waiting.popleft()
            rooms.handle(task, future.result())
            meter.add(task.nbytes, task.label)

        try:
            for task in tasks:
                while len(waiting) > 1 and _too_far_ahead([*(other for other, _ in waiting), task][1:]):
                    finish()
                waiting.append((task, pool.submit(rooms.load, task)))
            while waiting:
                finish()
        finally:
            for _, future in waiting:
                future.cancel()


def _too_far_ahead(tasks: list[Task]) -> bool:
    return len(tasks) > _MOST_AHEAD or sum(max(task.room, task.nbytes) for task in tasks) > _AHEAD


class Writing:
    """Writes behind the computation in a thread of its own, a few pieces deep; also sums checksums on the way.

    A context manager: leaving it waits for the last byte. Errors of the writing thread surface in the caller.
    """

    def __init__(self, writer: SafetensorsWriter):
        self.writer = writer
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nativedit-write")
        self._slots = threading.Semaphore(4)
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, kind, value, traceback) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            self._collect(wait=True)

    def put(self, name: str, tensor: torch.Tensor, offset: int = 0, then: Callable[[memoryview], None] | None = None):
        """Write a CPU tensor's bytes at ``offset`` of ``name``; ``then`` sees the bytes, in order."""
        from ..files.writer import tensor_bytes

        self._collect(wait=False)
        self._slots.acquire()
        self._pending.append(self._pool.submit(self._write, name, tensor_bytes(tensor), offset, then))

    def _write(self, name: str, data: memoryview, offset: int, then: Callable[[memoryview], None] | None) -> None:
        try:
            self.writer.write_bytes(name, data, offset)
            if then is not None:
                then(data)
        finally:
            self._slots.release()

    def _collect(self, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].done()):
            self._pending.popleft().result()


def copy_tasks(source: Source, key: str, out_name: str, writing: Writing) -> Iterator[Task]:
    """Copies the stored bytes of a tensor."""
    total = source.info(key).nbytes
    for start in range(0, total, COPIED):
        stop = min(start + COPIED, total)

        def load(start=start, stop=stop) -> torch.Tensor:
            return source.read_bytes(key, start, stop)

        def handle(piece: torch.Tensor, start=start) -> None:
            writing.put(out_name, piece, start)

        yield Task(load, handle, stop - start, key)


def cast_tasks(source: Source, key: str, out_name: str, dtype: torch.dtype, writing: Writing) -> Iterator[Task]:
    """Copies a tensor of any shape in another dtype. Raises QuantError for a number that float16 can't hold."""
    info = source.info(key)
    stored = torch_dtype(info.dtype)
    if info.nbytes == 0:
        return
    for start in range(0, info.nbytes, PIECE):
        stop = min(start + PIECE, info.nbytes)

        def load(start=start, stop=stop) -> torch.Tensor:
            return source.read_bytes(key, start, stop).view(stored)

        def handle(piece: torch.Tensor, start=start) -> None:
            cast = piece.to(dtype)
            if dtype is torch.float16 and (lost := cast.isinf()).any() and (lost & piece.double().isfinite()).any():
                problem = f"{key!r} has values that float16 can't hold (65504 is its largest); choose bfloat16"
                raise QuantError(source.where(key), problem)
            writing.put(out_name, cast, start // stored.itemsize * dtype.itemsize)

        yield Task(load, handle, stop - start, key)
