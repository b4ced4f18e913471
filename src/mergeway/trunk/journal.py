"""The journal: one record for each change of a trunk, each holding the hash of the one before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from mergeway.core.files import contents, regular
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import TrunkError
from mergeway.trunk.record import START as START
from mergeway.trunk.record import Record as Record
from mergeway.trunk.record import canonical, parse_record
from mergeway.trunk.record import now as now

MARK = 12  # hexadecimal digits


@dataclass(frozen=True)
class Folded:
    """An arrival that is part of the deployed model."""

    step: int
    task: str
    source: str
    digest: str
    weight: float


@dataclass(frozen=True)
class Point:
    """Where a trunk stands: its last record, where that one ends in the journal, and a mark for each arrival that the model holds.

    It is all that a new record needs, so a change costs the same however long the journal is. The head file keeps it, sealed
    by its own hash; whoever doubts it reads the whole journal and works it out again.
    """

    journal: Path
    last: Record
    end: int
    settings: str
    marks: str

    def head(self) -> bytes:
        """The head file: the last record's step and hash, this point, and the hash of both."""
        where = {"end": self.end, "settings": self.settings}
        text = f"{self.last.step} {self.last.hash}\n{canonical(where)}\n{self.marks}\n".encode()
        return text + hashlib.sha256(text).hexdigest().encode() + b"\n"

    @classmethod
    def read(cls, head: bytes, journal: Path) -> Point | None:
        """The point in a head file, if nothing speaks against it and the journal ends with the record that it names."""
        text, seal = head[:-65], head[-65:]
        if hashlib.sha256(text).hexdigest().encode() + b"\n" != seal:
            return None
        named, where, marks, _ = text.decode().split("\n")
        values = json.loads(where)
        regular(journal)
        with open(journal, "rb") as file:
            size = file.seek(0, 2)
            if size != values["end"]:
                return None
            line = _last_line(file, size)
        last = parse_record(journal, 0, line)
        sound = last.hash == last.computed_hash() and last.line() == line
        if not sound or f"{last.step} {last.hash}" != named:
            return None
        return cls(journal, last, size, values["settings"], marks)

    def grown(self, record: Record) -> Point:
        """The point behind the record of an arrival that was added."""
        end = self.end + len(record.line().encode()) + 1
        return replace(self, last=record, end=end, marks=self.marks + _marks([_folded(record)]))

    @cached_property
    def held(self) -> list[Folded]:
        """The arrivals that the model holds, in the order they were folded; for this the whole journal is read."""
        return Journal.read(self.journal, self.last.step).folded(self.last.step)

    @property
    def count(self) -> int:
        """How many arrivals the model holds."""
        return len(self.marks) // (2 * MARK)

    def __contains__(self, task: object) -> bool:
        """Whether the model holds an arrival of this name."""
        return self._may_hold(str(task), 0) and any(f.task == task for f in self.held)

    def with_digest(self, digest: str) -> Folded | None:
        """The arrival with these weights, if the model holds it."""
        return next((f for f in self.held if f.digest == digest), None) if self._may_hold(digest, MARK) else None

    def _may_hold(self, text: str, offset: int) -> bool:
        """Whether an arrival has the mark of this text; most often none has, and no record is read."""
        mark, at = _mark(text), -1
        while (at := self.marks.find(mark, at + 1)) >= 0:
            if at % (2 * MARK) == offset:
                return True
        return False


def _marks(held: Iterable[Folded]) -> str:
    """Of each arrival a piece of the hash of its name and of its digest: enough to say which arrivals are not among them."""
    return "".join(_mark(f.task) + _mark(f.digest) for f in held)


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:MARK]


def _folded(record: Record) -> Folded:
    assert record.task is not None and record.source is not None
    assert record.digest is not None and record.weight is not None
    return Folded(record.step, record.task, record.source, record.digest, record.weight)


def whole_record(path: Path, number: int, raw: bytes) -> Record:
    """The record of a line that is as it was written."""
    line = raw.decode("utf-8", "replace")
    record = parse_record(path, number, line)
    if record.computed_hash() != record.hash or record.line() != line:
        raise TrunkError(f"{path}, line {number}: the record of step {record.step} was changed after it was written")
    return record


def does_not_follow(path: Path, number: int) -> TrunkError:
    """Two whole records that do not belong together."""
    return TrunkError(
        f"{path}, line {number}: the record does not follow the one before it; a record was removed or moved"
    )


def held_newest_first(records: Iterable[Record], step: int) -> Iterator[Folded]:
    """The arrivals that the model of a step holds, the newest first, from records that come in this order."""
    gone: set[str | None] = set()  # tasks that a later step takes out
    for record in records:
        if step <= 0:
            return
        if record.step != step:
            continue  # behind the step, or skipped by a rollback
        step -= 1
        if record.kind == "add" and record.task not in gone:
            yield _folded(record)
        elif record.kind == "remove":
            gone.add(record.task)
        elif record.kind == "rollback":
            to = record.details.get("to")
            step = to if isinstance(to, int) and to <= step else 0


def _last_line(file: BinaryIO, size: int) -> str:
    """The last line of a file without its line feed."""
    block = 1 << 14
    while True:
        start = max(0, size - block)
        file.seek(start)
        tail = file.read(size - start)
        before = tail.rfind(b"\n", 0, len(tail) - 1)
        if before >= 0 or start == 0:
            return tail[before + 1 : -1].decode("utf-8", "replace") if tail.endswith(b"\n") else ""
        block *= 4


class Journal:
    """The records of a trunk in order, and where each of them ends in the file."""

    def __init__(self, path: Path, records: list[Record], ends: list[int]) -> None:
        self.path = path
        self.records = records
        self._ends = ends

    @classmethod
    def begin(cls, path: Path, record: Record) -> Journal:
        """The journal of a new trunk."""
        first = record.sealed(START)
        return cls(path, [first], [len(first.line().encode()) + 1])

    @classmethod
    def read(cls, path: Path, named: int = -1, progress: Progress = SILENT) -> Journal:
        """The journal in a file; a record that cannot be read, or does not follow from the one before, is an error.

        Behind the step that the head has `named`, a last line that is not whole is what a power cut left of a record that was
        being written: it is not part of the journal.
        """
        try:
            # By bytes and by line feeds alone: no other character that some take for the end of a line is one here.
            *lines, rest = contents(path).split(b"\n")
        except FileNotFoundError:
            raise TrunkError(f"{path.parent}: not a trunk (no {path.name}); make one with 'mergeway init'") from None
        except OSError as problem:
            raise TrunkError(f"{path}: the journal cannot be read ({problem})") from None
        if len(lines) - 1 > named and b"\0" in lines[-1]:  # a block that never reached the disk reads as zeros
            rest = lines.pop()
        records: list[Record] = []
        ends: list[int] = []
        previous, end = START, 0
        progress.begin(f"checking {path.name}", len(lines), "records")
        for number, raw in enumerate(lines, 1):
            record = whole_record(path, number, raw)
            if record.previous != previous or record.step != number - 1:
                raise does_not_follow(path, number)
            end += len(raw) + 1
            records.append(record)
            ends.append(end)
            previous = record.hash
            progress.advance(1)
        if rest and len(records) <= named:
            raise TrunkError(f"{path}, line {len(lines) + 1}: the last record is cut off or was changed")
        if not records:
            raise TrunkError(f"{path}: the journal is empty; restore it from a backup")
        return cls(path, records, ends)

    @property
    def last(self) -> Record:
        return self.records[-1]

    def point(self, step: int | None = None) -> Point:
        """Where the trunk stood after a step, by default the last."""
        at = self.last.step if step is None else step
        settings = str(self.records[0].details.get("settings"))
        return Point(self.path, self.records[at], self._ends[at], settings, _marks(self.folded(at)))

    def text(self) -> str:
        return "".join(record.line() + "\n" for record in self.records)

    def folded(self, step: int | None = None) -> list[Folded]:
        """The arrivals that the model of a step holds, in the order they were folded."""
        at = self.last.step if step is None else step
        return list(held_newest_first(reversed(self.records), at))[::-1]
