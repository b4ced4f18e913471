"""A trunk on disk.

    trunk.json       what was fixed at `init`: format, base, rule, options
    base/            what is kept of the base; base.json, where it is now, and base.seen, its files' stamps (see `base`, `stamps`)
    journal.jsonl    the history; a change happens at the one moment at which its record is at the end of this file
    head             the last record's step and hash, written after the journal, so that a shortened journal shows, and what the
                     next record needs to know of all records before it, so that a change costs the same at any step
    steps/000003/    the snapshot of a step: deployed weights, the rule's state, and digests.json over both
    tags.json        names of steps, whose snapshots are kept
    lock             held by the one writer

A snapshot is written under a temporary name, flushed, renamed into place, and only then is a record that names it appended
to the journal and flushed. Whatever is found without a whole record is the leftover of a killed writer and is removed by the
next: a snapshot, or the beginning of a line that the head does not name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from mergeway.checkpoint.directory import staged_directory
from mergeway.checkpoint.source import JsonObject
from mergeway.core.files import append, contents, place, reading, replace_unsure, write_text, writing
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import team
from mergeway.errors import CheckpointError, MergewayError, TrunkError, UnsureError
from mergeway.trunk.journal import Journal, Point, Record
from mergeway.trunk.lock import WriterLock
from mergeway.trunk.snapshot import DIGESTS, Digests, Snapshot
from mergeway.trunk.tags import read_tags

FORMAT = 3
# The steps that this process has committed, so that whoever is interrupted afterwards is told the truth.
committed: list[int] = []


class Store:
    """The files of one trunk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal_path = path / "journal.jsonl"
        self.settings_path = path / "trunk.json"
        self.head_path = path / "head"
        self.steps = path / "steps"
        self._known: Point | None = None  # where the trunk stands for as long as we hold the lock and change nothing
        self.changed = False  # whether we have committed something

    @classmethod
    def create(
        cls, path: Path, settings: Mapping[str, object], first: Record, fill: Callable[[Path], None] = lambda _: None
    ) -> Store:
        """A new trunk, complete or not at all; `fill` adds files of its own."""
        with writing(path):
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        if taken:
            what = "is a trunk already" if (path / "journal.jsonl").exists() else "exists and is not empty"
            raise TrunkError(f"{path}: {what}; choose another directory")
        text = json.dumps({"format": FORMAT, **settings}, indent=2, sort_keys=True) + "\n"
        details = {**first.details, "settings": hashlib.sha256(text.encode()).hexdigest()}
        journal = Journal.begin(path / "journal.jsonl", replace(first, details=details))
        try:
            with staged_directory(path) as stage, writing(path):
                (stage / "steps").mkdir()
                write_text(stage / "trunk.json", text)
                write_text(stage / "journal.jsonl", journal.text())
                (stage / "head").write_bytes(journal.point().head())
                fill(stage)
        except CheckpointError as problem:
            raise TrunkError(str(problem)) from None
        return cls(path)

    def settings(self) -> JsonObject:
        """What was fixed at `init`."""
        try:
            settings = json.loads(contents(self.settings_path))
            version = settings["format"]
        except (FileNotFoundError, NotADirectoryError):
            raise TrunkError(f"{self.path}: not a trunk (no trunk.json); make one with 'mergeway init'") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
            raise TrunkError(f"{self.settings_path}: cannot be read ({problem}); restore it from a backup") from None
        if version != FORMAT:
            how = f"has format {version!r}, this mergeway reads format {FORMAT}; use the version that wrote it"
            raise TrunkError(f"{self.settings_path}: the trunk {how}")
        return settings

    def _changed_settings(self) -> TrunkError:
        return TrunkError(f"{self.settings_path}: was changed after 'init'; restore it from a backup")

    def settings_digest(self) -> str:
        with reading(self.settings_path):
            return hashlib.sha256(contents(self.settings_path)).hexdigest()

    def journal(self, settings: bool = True, progress: Progress = SILENT) -> Journal:
        """The whole history, checked record by record, against the head and, with `settings`, with what `init` fixed."""
        # In this order: a writer appends to the journal first, so the head is never ahead of the journal read after it. A
        # head behind the journal is that of a writer killed before it got there; the next one brings it up.
        head = self._head()
        step = re.match(rb"(\d{1,12}) ", head)
        named = int(step[1]) if step else -1
        journal = Journal.read(self.journal_path, named, progress)
        if settings and journal.records[0].details.get("settings") != self.settings_digest():
            raise self._changed_settings()
        if named >= len(journal.records) or not step or head not in _heads(journal.point(named)):
            raise TrunkError(
                f"{self.journal_path}: ends at step {journal.last.step}, which is not what {self.head_path.name} says; records were cut off, or {self.head_path.name} was changed"
            )
        return journal

    def point(self) -> Point:
        """Where the trunk stands: as the head says if the journal ends there, else by the whole journal."""
        if self._known is not None:
            return self._known
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TrunkError):
            if (point := Point.read(self._head(), self.journal_path)) is not None:
                return point
        return self.journal().point()

    def trusted(self) -> Point:
        """The same point, once the settings are found to be those that its first record names."""
        point = self.point()
        if point.settings != self.settings_digest():
            raise self._changed_settings()
        return point

    def _head(self) -> bytes:
        with reading(self.head_path):
            return contents(self.head_path) if self.head_path.exists() else b""

    @contextlib.contextmanager
    def writer(self, wait: bool = True, progress: Progress = SILENT) -> Generator[None]:
        """Be the one writer (of a team, the lead is); the operating system frees the lock of a killed one."""
        lock = WriterLock(self.path / "lock")
        team().from_lead(lambda: lock.acquire(wait, progress))
        try:
            team().from_lead(self._sweep)
            yield
        finally:
            self._known = None
            lock.release()

    def _sweep(self) -> None:
        """Remove what a killed writer left: snapshots without a record, and temporary files."""
        point = self._known = self.trusted()
        with writing(self.path):
            for left in self.steps.iterdir() if self.steps.is_dir() else ():
                if not left.name.isdigit() or int(left.name) > point.last.step:
                    shutil.rmtree(left, ignore_errors=True)
            for left in self.path.glob("*.new"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    @contextlib.contextmanager
    def stage(self) -> Generator[Path]:
        """A directory for the next snapshot; gone again unless it was committed."""
        stage = team().from_lead(self._make_stage)
        try:
            yield stage
        finally:
            if team().lead:
                shutil.rmtree(stage, ignore_errors=True)

    def _make_stage(self) -> Path:
        with writing(stage := self.steps / f"next-{os.getpid()}"):
            stage.mkdir()
        return stage

    def commit(self, stage: Path, digests: Digests, point: Point, record: Record, keep: int) -> Record:
        """Make the staged snapshot and its record part of the trunk, both or neither, then drop the oldest snapshots."""
        return team().from_lead(lambda: self._commit(stage, digests, point, record, keep))

    def _commit(self, stage: Path, digests: Digests, point: Point, record: Record, keep: int) -> Record:
        text = json.dumps(digests, sort_keys=True, separators=(",", ":"))
        write_text(stage / DIGESTS, text)
        named = replace(record, files=hashlib.sha256(text.encode()).hexdigest())
        return self._append(point, named.sealed(point.last.hash), keep, stage)

    def commit_record(self, point: Point, record: Record, keep: int) -> Record:
        """A change that needs no snapshot of its own."""
        return self._append(point, record.sealed(point.last.hash), keep)

    def _append(self, point: Point, record: Record, keep: int, stage: Path | None = None) -> Record:
        """The commit: the snapshot gets its name, then the journal its record."""
        self._known = None
        line = (record.line() + "\n").encode()
        step = self.snapshot(record.step)
        try:
            if stage is not None:
                place(stage, step)
            append(self.journal_path, line, point.end)
        except BaseException as problem:
            if self.journal_path.stat().st_size < point.end + len(line):
                shutil.rmtree(step, ignore_errors=True)  # a snapshot without a record is a leftover
                with writing(self.path):
                    raise
            cause = getattr(problem, "strerror", None) or repr(problem)
            raise UnsureError(f"{self.path}: step {record.step} is committed", cause) from None
        committed.append(record.step)
        self.changed = True
        self._write_head(point, record)
        self.prune(keep)
        return record

    def _write_head(self, point: Point, record: Record) -> None:
        """A head that cannot be written stays behind, as if the writer had been killed here."""
        with contextlib.suppress(MergewayError, OSError):
            grown = point.grown(record) if record.kind == "add" else self.journal().point()
            replace_unsure(self.head_path, grown.head())

    def prune(self, keep: int) -> None:
        """Drop the oldest snapshots without a tag, out of a reader's sight at once; what stays now goes after the next commit."""
        with contextlib.suppress(OSError, MergewayError):
            for dropped in self.drop(keep):
                shutil.rmtree(dropped, ignore_errors=True)

    def drop(self, keep: int) -> Iterator[Path]:
        """Take the oldest snapshots without a tag out of a reader's sight, one after another; whoever asks removes them."""
        tagged = set(read_tags(self.path).values())
        for step in [step for step in self.present() if step not in tagged][:-keep]:
            os.rename(self.snapshot(step), dropped := self.steps / f"dropped-{step}")
            yield dropped

    def present(self) -> list[int]:
        """The steps that have a snapshot."""
        return sorted(int(p.name) for p in self.steps.iterdir() if p.name.isdigit())

    def snapshot(self, step: int) -> Path:
        return self.steps / f"{step:06d}"

    def has_snapshot(self, step: int) -> bool:
        return self.snapshot(step).is_dir()

    def of(self, record: Record) -> Snapshot:
        """The files of a record's step, checked as they are read."""
        return Snapshot(self.snapshot(record.step), record)


def _heads(point: Point) -> tuple[bytes, ...]:
    """What the head file may hold at a point; a trunk that was made before the head knew points has the first line alone."""
    return (head := point.head()), head[: head.index(b"\n") + 1]
