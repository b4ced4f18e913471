"""The newest records of a journal, read from its end, so that a look at them costs the same however long the journal is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mergeway.core.files import reading, regular
from mergeway.errors import TrunkError
from mergeway.trunk.journal import Point, Record, does_not_follow, whole_record

BLOCK = 1 << 15


def newest_first(point: Point) -> Iterator[Record]:
    """The records from the point back to the first, each checked by its own hash and by what the one behind it says.

    Only what is asked for is read and checked: the head vouches for the last record, and each record for the one before it.
    """
    step, sealed = point.last.step, point.last.hash
    for raw in _lines_backwards(point.journal, point.end - 1):
        record = whole_record(point.journal, step + 1, raw)
        if record.step != step or record.hash != sealed:
            raise does_not_follow(point.journal, step + 2)
        yield record
        step, sealed = step - 1, record.previous
    if step >= 0:
        raise TrunkError(f"{point.journal}: begins with step {step + 1}; records were cut off")


def _lines_backwards(path: Path, end: int) -> Iterator[bytes]:
    """The lines before a place in a file, the last one first."""
    rest, block = b"", BLOCK
    regular(path)
    while end > 0:
        start = max(0, end - block)
        with reading(path), open(path, "rb") as file:
            file.seek(start)
            text = file.read(end - start)
        rest, *lines = (text + rest).split(b"\n")
        yield from reversed(lines)
        # A line of many blocks must not be put together anew for each of them.
        end, block = start, BLOCK if lines else 2 * block
    yield rest
