"""The newest records are read from the end of the journal, with the same checks, whatever lies before them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from long_journal import lengthened, work_of

import mergeway as mw
from mergeway.trunk import newest as newests
from mergeway.trunk import store as stores
from mergeway.trunk.newest import newest_first


@pytest.fixture
def trunk(stream, tmp_path):
    """A history with every kind of change that matters to what a model holds."""
    s = stream(4)
    made = mw.Trunk.create(tmp_path / "trunk", s.base, "average", keep=9)
    for arrival in s.arrivals[:3]:
        made.add(arrival)
    made.remove("task2", s.arrivals[1])
    made.add(s.arrivals[1])
    made.rollback(4)
    made.add(s.arrivals[3])
    made.rollback(5)
    return made


def lengthy(s, path: Path, folds: int) -> Path:
    mw.Trunk.create(path, s.base, "average", threads=1).add(s.arrivals[0])
    lengthened(path, folds)
    return path


@pytest.fixture
def thirty(stream, tmp_path) -> Path:
    return lengthy(stream(1), tmp_path / "thirty", 30)


@pytest.mark.parametrize("block", [1, 7, 1000, 1 << 16])
def test_records_come_backwards(trunk, monkeypatch, block):
    """However the blocks fall on the lines."""
    monkeypatch.setattr(newests, "BLOCK", block)
    store = stores.Store(trunk.path)
    assert list(newest_first(store.point())) == trunk.log()[::-1]


def test_the_newest_are_the_end_of_the_whole(trunk):
    records = trunk.log()
    for count in range(1, len(records) + 3):
        assert trunk.log(newest=count) == records[-count:]
    for step in range(len(records)):
        held = trunk.folded(step)
        for count in range(1, 5):
            assert trunk.folded(step, newest=count) == held[-count:]
    assert trunk.folded(newest=2) == trunk.folded()[-2:]


def test_a_trunk_without_arrivals_holds_none(stream, tmp_path):
    made = mw.Trunk.create(tmp_path / "trunk", stream(1).base, "average")
    assert made.folded(newest=3) == [] and len(made.log(newest=3)) == 1


def edited(path: Path, line: int, old: bytes, new: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    assert old in lines[line]
    lines[line] = lines[line].replace(old, new)
    path.write_bytes(b"".join(lines))


def test_a_changed_record_shows_when_it_is_read(trunk, tmp_path):
    """As `add` trusts the last record without reading all before it; the whole journal finds any change."""
    edited(trunk.path / "journal.jsonl", 2, b'"task2"', b'"taskX"')
    assert len(trunk.log(newest=4)) == 4
    with pytest.raises(mw.MergewayError, match=r"line 3: the record of step 2 was changed"):
        trunk.log(newest=8)
    with pytest.raises(mw.MergewayError, match=r"line 3: the record of step 2 was changed"):
        trunk.log()


def test_a_record_of_another_history_shows(trunk, stream, tmp_path):
    """Whole and sealed, but not the one that the record behind it follows."""
    other = tmp_path / "other"
    shutil.copytree(trunk.path, other)
    path = other / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    record = trunk.record(6)
    forged = replace(record, details={**record.details, "message": "forged"}).sealed(record.previous)
    lines[6] = (forged.line() + "\n").encode()
    grown = len(lines[6]) - len((record.line() + "\n").encode())
    path.write_bytes(b"".join(lines))
    point = stores.Store(trunk.path).point()
    moved = replace(point, journal=path, end=point.end + grown)
    with pytest.raises(mw.MergewayError, match=r"line 8: the record does not follow the one before it"):
        list(newest_first(moved))


def test_a_journal_that_lost_its_beginning_shows(trunk):
    path = trunk.path / "journal.jsonl"
    point = stores.Store(trunk.path).point()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[2:]))
    shorter = replace(point, end=path.stat().st_size)
    with pytest.raises(mw.MergewayError, match="begins with step 2"):
        list(newest_first(shorter))


def test_changed_settings_show(trunk):
    settings = trunk.path / "trunk.json"
    settings.write_text(settings.read_text().replace('"keep": 9', '"keep": 8'))
    with pytest.raises(mw.MergewayError, match=r"trunk\.json: was changed after 'init'"):
        trunk.log(newest=1)


def test_a_record_behind_the_head_counts(trunk, stream):
    head = (trunk.path / "head").read_bytes()
    trunk.rollback(4)
    (trunk.path / "head").write_bytes(head)
    assert trunk.log(newest=1)[0].step == 9


def test_log_shows_the_newest_twenty(thirty, call):
    lines = call("log", thirty).ok().out.splitlines()
    steps = [int(line.split()[1]) for line in lines if line.startswith("step ")]
    assert steps == list(range(30, 10, -1)) and "deployed, kept" in lines[0]
    assert lines[-1] == "and 11 older steps; --all shows them"
    for words, count in (("--all",), 31), (("--last", 3), 3), (("--last", 99), 31):
        assert call("log", thirty, *words).ok().out.count("\nstep ") + 1 == count
    assert "older" not in call("log", thirty, "--all").ok().out


def test_log_as_json_is_whole_unless_you_say_so(thirty, call):
    assert [r["step"] for r in call("log", thirty, "--json").json()] == list(range(31))
    assert [r["step"] for r in call("log", thirty, "--json", "--last", 2).json()] == [29, 30]


def test_show_has_the_newest_twenty_arrivals(thirty, call):
    lines = call("show", thirty).ok().out.splitlines()
    rows = [line.split() for line in lines if line.split()[0].isdigit()]
    assert [int(row[0]) for row in rows] == list(range(11, 31))
    assert lines[-1] == "and 10 older arrivals; --all shows them"
    whole = call("show", thirty, "--all").ok().out.splitlines()
    assert sum(line.split()[0].isdigit() for line in whole) == 30 and "older" not in whole[-1]
    assert len(call("show", thirty, "--json").json()["folded"]) == 30
    old = call("show", thirty, 7).ok().out.splitlines()
    assert sum(line.split()[0].isdigit() for line in old) == 7 and "older" not in old[-1]


@pytest.mark.parametrize("words", [["--last", "0"], ["--last", "3", "--all"]])
def test_how_many_must_make_sense(thirty, call, words):
    assert call("log", thirty, *words).mistake().startswith("error: --last")


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not count bytes")
@pytest.mark.parametrize(("command", "looks"), [("log", 1), ("show", 2)])
def test_a_look_at_fold_2000_does_the_work_of_one_at_fold_30(stream, tmp_path, call, command, looks):
    s = stream(1)
    paths = [lengthy(s, tmp_path / str(folds), folds) for folds in (30, 2000)]
    call(command, paths[0]).ok()  # whatever is done only once in a process
    (calls, data), (more_calls, more_data) = (work_of(lambda path=path: call(command, path).ok()) for path in paths)
    assert more_calls <= 1.05 * calls
    # At each look 24 bytes for each arrival in the head, and a whole block of the journal instead of all of it.
    assert more_data - data <= looks * (24 * (2000 - 30) + newests.BLOCK)
