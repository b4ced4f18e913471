"""A trunk with a long journal, and what a look at it costs."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

from mergeway.trunk.journal import Journal
from mergeway.trunk.store import Store


def lengthened(path: Path, last: int) -> None:
    """A trunk of one fold that looks as if it had had many: every record is there, and the snapshot is that of the last."""
    records = Store(path).journal().records
    for step in range(2, last + 1):
        digest = hashlib.sha256(str(step).encode()).hexdigest()
        stream = {**records[1].stream, "step": step, "total": float(step)}
        record = replace(records[1], step=step, task=f"task {step}", digest=digest, stream=stream)
        records.append(record.sealed(records[-1].hash))
    (path / "journal.jsonl").write_text("".join(record.line() + "\n" for record in records))
    (path / "steps" / "000001").rename(path / "steps" / f"{last:06d}")
    journal = Journal.read(path / "journal.jsonl")
    (path / "head").write_bytes(journal.point().head())


def work_of(act) -> tuple[int, int]:
    """How many functions an action calls, and how many bytes it reads and writes."""

    def io() -> int:
        counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counts["rchar"]) + int(counts["wchar"])

    calls = 0

    def count(frame, event, arg) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = io()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls, io() - before
