"""The journal is appended to: a change costs the same at any step, and what a power cut leaves of a line is no record."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from long_journal import lengthened, work_of

import mergeway as mw
from mergeway.core import files
from mergeway.core.progress import Progress
from mergeway.trunk import journal as journals
from mergeway.trunk import store as stores


@pytest.fixture
def trunk(stream, tmp_path):
    s = stream(4)
    made = mw.Trunk.create(tmp_path / "trunk", s.base, "average", keep=4)
    for arrival in s.arrivals[:3]:
        made.add(arrival)
    return made, s


def test_an_add_reads_one_record(trunk, monkeypatch):
    """The last one, and the head once."""
    made, s = trunk
    parsed = []
    parse = journals.parse_record
    monkeypatch.setattr(journals, "parse_record", lambda *words: (parsed.append(words), parse(*words))[1])
    made.add(s.arrivals[3])
    assert len(parsed) == 1
    monkeypatch.undo()
    assert made.verify() == [] and len(made.log()) == 5


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count bytes")
def test_an_add_at_fold_2000_does_the_work_of_one_at_fold_20(stream, tmp_path):
    s = stream(3)
    work = {}
    for folds in (20, 2000):
        path = tmp_path / str(folds)
        mw.Trunk.create(path, s.base, "average", threads=1).add(s.arrivals[0])
        lengthened(path, folds)
        mw.Trunk.open(path, threads=1).add(s.arrivals[1])  # whatever is done only once in a process
        work[folds] = work_of(lambda path=path: mw.Trunk.open(path, threads=1).add(s.arrivals[2]))
        assert mw.Trunk.open(path).verify() == []
    (calls, data), (more_calls, more_data) = work.values()
    assert more_calls <= 1.05 * calls
    # 24 bytes for each arrival in the head, read once and written once.
    assert more_data - data <= 2 * 24 * (2000 - 20) + 1000


class Counted(Progress):
    """How far each stage came."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[int | None, int]] = {}

    def begin(self, what: str, total: int | None, unit: str) -> None:
        self._now = f"{what}, {unit}"
        self.stages[self._now] = (total, 0)

    def advance(self, done: int) -> None:
        total, before = self.stages[self._now]
        self.stages[self._now] = (total, before + done)


def test_verify_tells_how_far_it_is(trunk):
    """Its time grows with the journal and the snapshots, and both are counted."""
    made, _ = trunk
    counted = Counted()
    assert mw.Trunk.open(made.path, threads=1, progress=counted).verify() == []
    assert counted.stages["checking journal.jsonl, records"] == (4, 4)
    total, done = counted.stages["verifying model.safetensors, bytes"]
    assert total is not None and 0 < done <= total


def test_what_a_model_holds_is_found_in_one_walk(trunk):
    """Removed, added again, rolled back to and fro: as a list that is changed record by record has it."""
    made, s = trunk
    made.remove("task2", s.arrivals[1])
    made.add(s.arrivals[1])
    made.rollback(4)
    made.add(s.arrivals[3])
    made.rollback(5)
    made.rollback(0)
    journal = stores.Store(made.path).journal()
    held: list[list[str]] = []
    for record in journal.records:
        now = list(held[-1]) if held else []
        if record.kind == "add":
            now.append(record.task)
        elif record.kind == "remove":
            now.remove(record.task)
        elif record.kind == "rollback":
            now = held[record.details["to"]]
        held.append(now)
        assert [f.task for f in journal.folded(record.step)] == now
    assert held[5] == held[8] == ["task1", "task3", "task2"] and held[-1] == []


def test_the_journal_grows_in_place(trunk):
    made, s = trunk
    path = made.path / "journal.jsonl"
    before, inode = path.read_bytes(), path.stat().st_ino
    made.add(s.arrivals[3])
    assert path.stat().st_ino == inode and path.read_bytes().startswith(before)


def test_the_head_knows_what_the_journal_says(trunk):
    """After every kind of change the point in the head is the one worked out from the whole journal."""
    made, s = trunk
    store = stores.Store(made.path)

    def check():
        head = (made.path / "head").read_bytes()
        journal, point = store.journal(), store.point()
        assert head == journal.point().head()
        assert journals.Point.read(head, made.path / "journal.jsonl") == journal.point()
        assert point.held == journal.folded() and point.count == len(point.held)
        assert all(f.task in point and point.with_digest(f.digest) for f in point.held)
        assert "task9" not in point and point.with_digest("0" * 64) is None

    check()
    made.remove("task2", s.arrivals[1])
    check()
    made.add(s.arrivals[3], 'quoted "name" é', 2)
    check()
    made.rollback(4)
    check()
    made.rollback(0)
    check()
    made.add(s.arrivals[0])
    check()


def torn(made) -> list[bytes]:
    """What a power cut may leave of the line of a fourth record."""
    line = (made.path / "journal.jsonl").read_bytes().splitlines()[-1]
    return [
        line[:1],
        line[:200],
        line,
        b"\0" * len(line),
        line[:50] + b"\0" * 40,
        b"\0" * 300 + line[300:] + b"\n",
        b"\xff",
    ]


def test_a_torn_line_is_no_record(trunk, tmp_path):
    made, s = trunk
    whole = (made.path / "journal.jsonl").read_bytes()
    for number, left in enumerate(torn(made)):
        path = tmp_path / f"torn-{number}"
        shutil.copytree(made.path, path)
        (path / "journal.jsonl").write_bytes(whole + left)
        opened = mw.Trunk.open(path)
        assert opened.verify() == [] and len(opened.log()) == 4, left
        assert opened.add(s.arrivals[3]).step == 4
        assert opened.verify() == []
        assert (path / "journal.jsonl").read_bytes().startswith(whole)


def test_a_line_that_the_head_names_is_never_given_up(trunk):
    made, _ = trunk
    path = made.path / "journal.jsonl"
    whole = path.read_bytes()
    for cut in (whole[:-1], whole[:-100], whole[:-50] + b"\0" * 49 + b"\n", whole[: whole.rfind(b"\n", 0, -1) + 1]):
        path.write_bytes(cut)
        with pytest.raises(mw.MergewayError, match=r"journal\.jsonl"):
            made.log()
        with pytest.raises(mw.MergewayError, match=r"journal\.jsonl"):
            made.rollback(1)
        assert path.read_bytes() == cut


def test_a_record_behind_the_head_counts(trunk):
    """Killed between the journal and the head."""
    made, s = trunk
    head = (made.path / "head").read_bytes()
    made.add(s.arrivals[3])
    (made.path / "head").write_bytes(head)
    assert len(made.log()) == 5 and made.verify() == []
    assert made.remove("task4", s.arrivals[3]).step == 5
    assert made.verify() == [] and (made.path / "head").read_bytes() != head


def test_a_head_of_one_line_is_read(trunk):
    """As trunks had it that were made before the head knew more."""
    made, s = trunk
    head = (made.path / "head").read_bytes()
    (made.path / "head").write_bytes(head[: head.index(b"\n") + 1])
    assert made.verify() == [] and made.add(s.arrivals[3]).step == 4 and made.verify() == []


def test_a_head_that_lies_with_a_right_seal(trunk, call):
    """The seal finds accidents; `verify`, which reads the journal, finds the rest."""
    made, _ = trunk
    point = stores.Store(made.path).point()
    lying = journals.replace(point, marks="0" * 24 + point.marks[24:])
    (made.path / "head").write_bytes(lying.head())
    assert "head was changed" in call("verify", made.path).mistake()


@pytest.mark.parametrize("call_that_fails", ["pwrite", "fsync"])
def test_a_failed_append_leaves_the_file_as_it_was(tmp_path, monkeypatch, call_that_fails):
    path = tmp_path / "journal"
    path.write_bytes(b"one\ntwo\n")
    original, calls = getattr(os, call_that_fails), []

    def fails(*words):
        calls.append(words)
        if len(calls) == 1:
            if call_that_fails == "pwrite":
                original(words[0], words[1][:3], words[2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*words)

    monkeypatch.setattr(os, call_that_fails, fails)
    with pytest.raises(OSError, match="space"):
        files.append(path, b"three\n", 8)
    assert path.read_bytes() == b"one\ntwo\n"


def test_short_writes_are_gone_on_with(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    path.write_bytes(b"one\nhalf a li")
    original = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: original(fd, data[:2], at))
    files.append(path, b"three\n", 4)
    assert path.read_bytes() == b"one\nthree\n"
