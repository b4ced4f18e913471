"""Workers that share the cores, and memory that goes back to the system while they walk over a model.

glibc keeps freed memory for later, but a block on a boundary of 64 bytes, as torch wants it, seldom fits where one of its
size was freed. Over a long walk such holes add up to several bytes for every parameter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import torch
from threadpoolctl import threadpool_limits

from mergeway.core import ranks
from mergeway.errors import OptionError

TRIM_EVERY = 1 << 25  # bytes of tensors walked between two times that memory is given back
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of malloc.h, each with M_ before it
_LARGE_BLOCK, _LARGEST_KEPT, _MAPPED_BLOCKS = 1 << 17, 1 << 25, 1 << 16


@contextlib.contextmanager
def worker_pool(threads: int | None = None, team: ranks.Team | None = None) -> Iterator[Executor]:
    """Workers that run torch and BLAS on one thread each: as many as there are cores unless `threads` is given.

    Those of all ranks of the team (by default the one this process is in) work as one pool.
    """
    count = threads if threads is not None else usable_cores()
    if count < 1:
        raise OptionError(f"--threads is {count}; it must be at least 1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            threadpool_limits(1, user_api="blas"),
            ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as workers,
        ):
            yield (team or ranks.team()).pool(workers, count)
    finally:
        torch.set_num_threads(before)


def usable_cores() -> int:
    """The cores that this process may use; of the machine where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class MemoryTrimmer:
    """Counts the bytes that a walk has passed, and now and then gives the memory freed behind it back to the system."""

    def __init__(self) -> None:
        _keep_freed_blocks()
        self._passed, self._lock = 0, threading.Lock()

    def passed(self, nbytes: int) -> None:
        """The walk is done with so many bytes; may come from any thread."""
        with self._lock:
            self._passed += nbytes
            due = self._passed >= TRIM_EVERY
            if due:
                self._passed = 0
        if due:
            return_freed_blocks()


def _keep_freed_blocks() -> None:
    """From now on memory that is freed stays until it is trimmed: a walk wants it back at once, and the system clears every page anew.

    Both numbers are those that glibc comes to by itself where a block of 32 MiB was freed.
    """
    if set_option := _glibc("mallopt"):
        set_option(_MMAP_THRESHOLD, _LARGEST_KEPT)
        set_option(_TRIM_THRESHOLD, 2 * _LARGEST_KEPT)


@contextlib.contextmanager
def keeping_freed_blocks() -> Generator[None]:
    """Meanwhile blocks of any size stay when they are freed; at the end they go back.

    A language model takes and frees the logits of its whole vocabulary in every pass. The system clears their pages each time,
    which takes as long as the arithmetic. The price is holes: up to a sixth more memory was measured.
    """
    set_option = _glibc("mallopt")
    if not set_option:
        yield
        return
    set_option(_MMAP_MAX, 0)
    set_option(_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        set_option(_MMAP_MAX, _MAPPED_BLOCKS)
        _keep_freed_blocks()
        return_freed_blocks()


def return_freed_blocks() -> None:
    """Give back what is free now: before much is taken that does not fit into the holes that are left."""
    if trim := _glibc("malloc_trim"):
        trim(0)


def return_large_blocks() -> None:
    """From now on a block of 128 KiB or more is given back as soon as it is freed.

    It costs the system's time for every such block: worth it where they come and go between long computations.
    """
    if set_option := _glibc("mallopt"):
        set_option(_MMAP_THRESHOLD, _LARGE_BLOCK)


def _glibc(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library
        return None
