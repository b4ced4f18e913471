"""Reading ahead: while one parameter is folded, the disk already works on those behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

AHEAD = 4  # parameters; more only fill the page cache


@contextlib.contextmanager
def reading_ahead(names: Sequence[str], expect: Callable[[str], None]) -> Generator[Callable[[str], None]]:
    """A function to call when a walk in this order comes to a parameter; `expect` announces one that comes later."""
    behind = dict(zip(names, names[AHEAD:], strict=False))
    # A thread of its own: a disk with enough to do makes whoever asks for more wait.
    reader = ThreadPoolExecutor(1)
    try:
        for name in names[:AHEAD]:
            reader.submit(expect, name)

        def reached(name: str) -> None:
            if name in behind:
                reader.submit(expect, behind[name])

        yield reached
    finally:
        reader.shutdown(wait=True, cancel_futures=True)
