"""Memory that was freed, given back to the system.

glibc keeps it for later, but a block on a boundary of 64 bytes, as torch wants it, seldom fits where one of its size was freed.
Over a long walk such holes add up to several bytes for every parameter.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
EVERY = 1 << 25  # bytes of tensors walked between two times


def _glibc(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library
        return None


def map_large_blocks() -> None:
    """From now on a block of 128 KiB or more is given back as soon as it is freed.

    It costs the system's time for every such block: worth it where they come and go between long computations.
    """
    if set_option := _glibc("mallopt"):
        set_option(_MMAP_THRESHOLD, 1 << 17)


class Tidy:
    """Counts the bytes that a walk has passed, and gives the holes behind it back now and then."""

    def __init__(self) -> None:
        self._passed, self._lock, self._trim = 0, threading.Lock(), _glibc("malloc_trim")

    def passed(self, nbytes: int) -> None:
        """So many bytes are done with."""
        with self._lock:
            self._passed += nbytes
            due = self._passed >= EVERY
            if due:
                self._passed = 0
        if due and self._trim:
            self._trim(0)
