"""A record of the journal: one change of a trunk, sealed by its hash and by that of the record before, and where its source lies."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from types import NoneType

from mergeway.checkpoint.source import JsonObject
from mergeway.core.printed import html_table
from mergeway.errors import TrunkError

START = "0" * 64


@dataclass(frozen=True, repr=False)
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
    stream: JsonObject = field(default_factory=dict[str, object])
    details: JsonObject = field(default_factory=dict[str, object])
    previous: str = START
    hash: str = ""

    def __repr__(self) -> str:
        return f"Record({', '.join(f'{name}={value!r}' for name, value in self._shown().items())})"

    def _repr_html_(self) -> str:
        return html_table(f"Step {self.step}", ("", ""), list(self._shown().items()))

    def _shown(self) -> JsonObject:
        """What says most, the digests cut short; `asdict` has the rest."""
        row: JsonObject = {"step": self.step, "kind": self.kind, "task": self.task, "source": self.source}
        row |= {"weight": self.weight, "result": self.result[:12], "time": self.time}
        row |= {str(check["task"]): round(float(check["after"]), 2) for check in self.details.get("checks", [])}
        return {name: value for name, value in row.items() if value is not None}

    def sealed(self, previous: str) -> Record:
        """The record with its place in the chain and its own hash."""
        open_ended = replace(Record(**asdict(self)), previous=previous, hash="")
        return replace(open_ended, hash=open_ended.computed_hash())

    def computed_hash(self) -> str:
        body = {key: value for key, value in asdict(self).items() if key != "hash"}
        return hashlib.sha256(canonical(body).encode()).hexdigest()

    def line(self) -> str:
        return canonical(asdict(self))


def canonical(value: object) -> str:
    """The one text of a JSON value that hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def now() -> str:
    """The time as a journal writes it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# What the fields of a record may be; a file may say anything.
_OPTIONAL = (str, NoneType)
_KINDS = {
    **dict.fromkeys(("kind", "result", "time", "previous", "hash"), str),
    **dict.fromkeys(("task", "source", "digest", "files"), _OPTIONAL),
    **dict.fromkeys(("stream", "details"), dict),
    "step": int,
    "weight": (int, float, NoneType),
}


def parse_record(path: Path, number: int, line: str) -> Record:
    """The record of one line of a journal file, or an error that names the line."""
    try:
        record = Record(**json.loads(line))
        if not all(isinstance(getattr(record, name), kinds) for name, kinds in _KINDS.items()):
            raise TypeError
        if record.kind in ("add", "remove") and None in (record.task, record.source, record.digest, record.weight):
            raise TypeError
        return record
    except (ValueError, TypeError, RecursionError):
        names = ", ".join(f.name for f in fields(Record))
        raise TrunkError(
            f"{path}, line {number}: not a journal record (expected one JSON object with {names})"
        ) from None


@dataclass(frozen=True)
class Places:
    """A reference as it was given; a path on this disk also from the root and from the trunk's directory."""

    source: str
    absolute: str | None = None
    relative: str | None = None

    @classmethod
    def of(cls, source: str, trunk: Path) -> Places:
        """The places of a reference; a hub id or a model in memory has no other than its name."""
        if not Path(source).exists():
            return cls(source)
        absolute = Path(source).absolute()
        return cls(source, str(absolute), os.path.relpath(absolute, trunk.absolute()))

    @classmethod
    def recorded(cls, record: Record) -> Places:
        """Where the arrival of a record was when it was folded."""
        known = record.details.get("places", {})
        return cls(str(record.source), known.get("absolute"), known.get("relative"))

    def on_disk(self) -> dict[str, str]:
        """What a record keeps besides the reference itself."""
        found = {"absolute": self.absolute, "relative": self.relative}
        return {key: value for key, value in found.items() if value is not None}

    def seen_from(self, trunk: Path) -> list[str]:
        """What to try, in this order; a relative path that was typed meant another working directory."""
        near = os.path.normpath(trunk.absolute() / self.relative) if self.relative else None
        return list(dict.fromkeys(place for place in (self.absolute or self.source, near) if place))
