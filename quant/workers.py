"""Spreads pieces of work over the processors, in threads whose torch operations stay in one thread each.

torch's own threads meet at a barrier after every operation: on pieces small enough for a processor's cache that costs
more than it gains, and on a busy machine a hundred times more.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["spread"]

# glibc gives freed memory back to the system, to ask for it anew page by page, from twice the largest block on that it
# was given back so far; it learns from blocks of up to 32 MiB. Temporaries of a few MiB then cost more than the work.
_LARGEST_LEARNT = (32 << 20) - (64 << 10)

Item = TypeVar("Item")
Result = TypeVar("Result")


@functools.lru_cache(maxsize=1)
def _keep_freed_memory() -> None:
    torch.empty(_LARGEST_LEARNT, dtype=torch.uint8)  # freed at once, its pages never touched


@functools.lru_cache(maxsize=1)
def _pool(count: int) -> ThreadPoolExecutor:
    started = threading.Barrier(count + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first question sets its number to everybody's
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="nativedit-compute", initializer=begin)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    # The setting is each thread's own, but the last one made is also what threads begun later start with.
    torch.set_num_threads(count)
    return pool


def spread(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """``work`` of every item, in order; as many at once as torch has threads, one more waiting. Errors come through."""
    _keep_freed_memory()
    count = torch.get_num_threads()
    if count == 1:
        yield from map(work, items)
        return
    pool = _pool(count)
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
