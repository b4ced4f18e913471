"""The journal: one record for each change of a trunk, each holding the hash of the one before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mergeway.errors import TrunkError

START = "0" * 64


@dataclass(frozen=True)
class Record:
    """One change: what was done, from what, and what came of it.

    `result` is the digest of the deployed weights, `files` the digest list of the snapshot, `stream` where the rule stands,
    `hash` that of all the other fields, among them `previous`, the hash of the record before.
    """

    step: int
    kind: str
    result: str
    time: str
    task: str | None = None
    source: str | None = None
    digest: str | None = None
    weight: float | None = None
    files: str | None = None
    stream: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    previous: str = START
    hash: str = ""

    def sealed(self, previous: str) -> Record:
        """The record with its place in the chain and its own hash."""
        open_ended = Record(**{**asdict(self), "previous": previous, "hash": ""})
        return Record(**{**asdict(open_ended), "hash": open_ended.computed_hash()})

    def computed_hash(self) -> str:
        body = {key: value for key, value in asdict(self).items() if key != "hash"}
        return hashlib.sha256(_canonical(body).encode()).hexdigest()

    def line(self) -> str:
        return _canonical(asdict(self))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def now() -> str:
    """The time as a journal writes it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Folded:
    """An arrival that is part of the deployed model."""

    step: int
    task: str
    source: str
    digest: str
    weight: float


class Journal:
    """The records of a trunk in order; a new one makes a new journal."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records

    @classmethod
    def read(cls, path: Path) -> Journal:
        """The journal in a file; a record that cannot be read, or does not follow from the one before, is an error."""
        try:
            # By bytes and by line feeds alone: no other character that some take for the end of a line is one here.
            *lines, rest = path.read_bytes().decode("utf-8").split("\n")
        except FileNotFoundError:
            raise TrunkError(f"{path.parent}: not a trunk (no {path.name}); make one with 'mergeway init'") from None
        except (OSError, UnicodeDecodeError) as problem:
            raise TrunkError(f"{path}: the journal cannot be read ({problem})") from None
        records, previous = [], START
        for number, line in enumerate(lines, 1):
            record = _parse(path, number, line)
            if record.computed_hash() != record.hash or record.line() != line:
                raise TrunkError(
                    f"{path}, line {number}: the record of step {record.step} was changed after it was written"
                )
            if record.previous != previous or record.step != number - 1:
                raise TrunkError(
                    f"{path}, line {number}: the record does not follow the one before it; a record was removed or moved"
                )
            records.append(record)
            previous = record.hash
        if rest:
            raise TrunkError(f"{path}, line {len(lines) + 1}: the last record is cut off or was changed")
        if not records:
            raise TrunkError(f"{path}: the journal is empty; restore it from a backup")
        return cls(records)

    @property
    def last(self) -> Record:
        return self.records[-1]

    def with_record(self, record: Record) -> Journal:
        return Journal([*self.records, record.sealed(self.last.hash if self.records else START)])

    def head(self) -> str:
        """What the head file says of the journal."""
        return f"{self.last.step} {self.last.hash}\n"

    def text(self) -> str:
        return "".join(record.line() + "\n" for record in self.records)

    def folded(self, step: int | None = None) -> list[Folded]:
        """The arrivals that the model of a step holds, in the order they were folded."""
        held: dict[int, list[Folded]] = {}
        for record in self.records:
            before = held.get(record.step - 1, [])
            if record.kind == "add":
                assert (
                    record.task is not None
                    and record.source is not None
                    and record.digest is not None
                    and record.weight is not None
                )
                before = [*before, Folded(record.step, record.task, record.source, record.digest, record.weight)]
            elif record.kind == "remove":
                before = [f for f in before if f.task != record.task]
            elif record.kind == "rollback":
                before = held[record.details["to"]]
            held[record.step] = before
        return held[self.last.step if step is None else step]


def _parse(path: Path, number: int, line: str) -> Record:
    try:
        values = json.loads(line)
        return Record(**values)
    except (ValueError, TypeError, RecursionError):
        names = ", ".join(f.name for f in fields(Record))
        raise TrunkError(
            f"{path}, line {number}: not a journal record (expected one JSON object with {names})"
        ) from None
