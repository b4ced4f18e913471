"""Every command that writes, with a fault at every system call that changes something.

After each of them: the trunk opens and verifies, its last commit is there bit by bit, the message is true and one line, a
clean failure leaves nothing behind, and the same command then comes to the same bits as if nothing had happened. A sample
runs always, all of it under `slow`; `-s` prints the counts.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from commands import ELSEWHERE, LOOKING, ROWS, Inputs, Row, journal, tensors
from injector import FAULTS, NOT_CHANGES, ONLY_WRITES, READS, REMOVALS, WRITES, Call, Ended, Injector, why_not

import mergeway as mw

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SAMPLE = 3  # faults of each command that always run

# What a process that was ended may leave, and the next one removes or goes on from.
LEFT = re.compile(
    r"(^|/)(\.[^/]*\.(partial|replaced)-\d+|next-\d+|dropped-\d+|mergeway-push-\d+-\w+|[^/]*\.\d+\.new)(/|$)"
)
RESUMED = re.compile(r"^(\.[^/]*\.training|run)(/|$)")
STEP = re.compile(r"^(.*/?(?:trunk|out)/steps)/(\d+)/")
Bits = dict[str, bytes]


class Bench:
    """One command's folder before and after it has run, and what a fault makes of it."""

    def __init__(self, row: Row, injector: Injector, inputs: Inputs, folder: Path) -> None:
        self.row, self._injector, self._inputs = row, injector, inputs
        self._start, self.work = folder / "start", folder / "work"
        self._start.mkdir()
        row.start(inputs, self._start)
        row.reset(inputs)
        self.before = self.found(self._start)
        self.calls = self._clean().calls
        self.after = self.found()
        assert self.after != self.before
        self.seen: set[frozenset] = set()

    def _clean(self) -> Ended:
        self.fresh()
        done = self.run()
        assert done.code == 0, done.err
        return done

    def is_repeatable(self) -> None:
        """Without a fault, the same words come to the same bits."""
        self._clean()
        assert self.found() == self.after

    def fresh(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self._start, self.work)
        self.row.reset(self._inputs)

    def run(self, fault: str | None = None, at: int = 0, reads: bool = False) -> Ended:
        environment = self.row.environment(self._inputs, self.work)
        words = self.row.words(self._inputs, self.work)
        return self._injector.run(words, self.work, fault, at, reads, environment)

    def again(self) -> Ended:
        environment = self.row.environment(self._inputs, self.work)
        words = (self.row.again or self.row.words)(self._inputs, self.work)
        return self._injector.run(words, self.work, environment=environment)

    def found(self, folder: Path | None = None) -> Bits:
        """Every file by its content, apart from what the clock decides."""
        return bits_of(self.row, folder or self.work) | self.row.beside(self._inputs)

    def left(self) -> frozenset[tuple[str, str]]:
        """All that is there, apart from process numbers and the clock."""
        bits = self.found()
        names = {str(p.relative_to(self.work)) for p in self.work.rglob("*")}
        heads = {n: (self.work / n).stat().st_size for n in names if n.endswith("head")}
        return frozenset(
            (re.sub(r"\d{2,}", "N", name) if LEFT.search(name) else name, str(hash(bits.get(name, heads.get(name)))))
            for name in names
        )

    def trunks(self) -> list[Path]:
        return [p.parent for p in self.work.rglob("trunk.json") if not LEFT.search(str(p.relative_to(self.work)))]


def bits_of(row: Row, root: Path) -> Bits:
    """Every file in a folder by its content, apart from what the clock decides."""
    bits = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.name not in ("lock", "head", "base.seen")):
        name, content = str(path.relative_to(root)), path.read_bytes()
        if path.suffix == ".safetensors" and not LEFT.search(name):
            content = tensors(content)
        bits[name] = journal(content) if path.name == "journal.jsonl" else row.varies(name, content)
    return bits


def committed(bits: Bits, before: Bits, after: Bits) -> str | None:
    """Whether the old state is there or the new one, bit by bit; None for neither."""
    visible = {name: content for name, content in bits.items() if not LEFT.search(name)}
    for state, expected in (("after", after), ("before", before)):
        more = {n: c for n, c in visible.items() if n not in expected}
        if all(visible.get(n) == c for n, c in expected.items()) and all(STEP.match(n) for n in more):
            return state
    return None


def check(bench: Bench, fault: str, at: int) -> str:
    """One fault at one call; what came of it."""
    bench.fresh()
    ended = bench.run(fault, at)
    where = f"{bench.row}, {fault} at call {at} {bench.calls[at]}: exit {ended.code}, {ended.err.strip()[-300:]}"
    assert ended.fired, where
    bits = bench.found()
    resumable = {n: c for n, c in bits.items() if bench.row.resumes and RESUMED.match(n)}
    rest = {n: c for n, c in bits.items() if n not in resumable}
    state = "after" if bits == bench.after else committed(rest, bench.before, bench.after)
    if bench.row.bit_by_bit and bits != bench.after and state == "after":
        state = "before"  # what is not done yet is as it was, and the same command does the rest
        assert all(bench.before.get(n) == c for n, c in bits.items() if not LEFT.search(n)), where
    assert state, where
    if fault in ("kill", "torn write"):
        assert ended.killed, where
    elif ended.code == 0:
        assert state == "after", where
        assert not ended.err.startswith("error"), where
    else:
        _is_true(ended, state, bench, where)
    if not ended.killed and fault != "EROFS" and not _removes(bench.calls[at]):
        expected = bench.after if state == "after" else bench.before
        if bench.row.bit_by_bit:
            expected = {n: c for n, c in expected.items() if n in rest}
        assert rest == {n: c for n, c in expected.items() if n in rest or not resumable}, where
    if (left := bench.left()) not in bench.seen:  # most faults leave what another one left
        _goes_on(bench, state, where)
        bench.seen.add(left)
    return "killed" if ended.killed else "survived" if ended.code == 0 else "refused"


def _removes(call: Call) -> bool:
    """What could not be removed is there still; an old snapshot goes by a rename first."""
    return call.name in REMOVALS or (call.name == "rename" and bool(re.search(r"/steps/\d+$", call.path)))


def _is_true(ended: Ended, state: str, bench: Bench, where: str) -> None:
    """The one line of a failure says what has become of things."""
    assert ended.code == 2, where
    lines = ended.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), where
    line = lines[0]
    assert "bug" not in line and "Traceback" not in line, where
    assert str(bench.work) in line, where
    assert re.search(
        r"Input/output error|No space left|no space left|Interrupted system call|Read-only file system|error closing file",
        line,
    ), where
    if not (bench.row.resumes or bench.row.bit_by_bit):  # what it goes on from is written, too
        assert (state == "after") == ("is committed, but" in line or "is written, but" in line), where
    assert state == "before" or "nothing was changed" not in line, where


def _goes_on(bench: Bench, state: str, where: str) -> None:
    """The trunk verifies, no leftover is in the way of the next command, and the same one comes to the same bits."""
    for trunk in bench.trunks():
        assert mw.Trunk.open(trunk, threads=1).verify() == [], where
    if state == "before":
        again = bench.again()
        assert again.code == 0, f"{where}; again: {again.err}"
        assert bench.found() == bench.after, where
    for trunk in bench.trunks():
        last = mw.Trunk.open(trunk, threads=1)
        last.rollback(last.log()[-1].step)
        assert last.verify() == [], where
        names = {str(p.relative_to(trunk)) for p in trunk.rglob("*")}
        assert not [n for n in names if LEFT.search(n)], where


def points(bench: Bench) -> list[tuple[str, int]]:
    """Every fault at every call."""
    return [
        (fault, at)
        for at, call in enumerate(bench.calls)
        for fault in FAULTS
        if (fault not in ONLY_WRITES or call.name in WRITES) and (fault != "EROFS" or call.name not in NOT_CHANGES)
    ]


def test_a_sample_of_faults(injector, inputs, tmp_path):
    """Faults spread over the calls of every command; one test, so that one process imports everything once."""
    for number, row in enumerate(ROWS):
        folder = tmp_path / str(number)
        folder.mkdir()
        bench = Bench(row, injector, inputs, folder)
        every = points(bench)
        for k in range(SAMPLE):
            check(bench, *every[(7 * number + k * len(every) // SAMPLE) % len(every)])


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_fault(row, injector, inputs, tmp_path, capsys):
    bench = Bench(row, injector, inputs, tmp_path)
    bench.is_repeatable()
    every = points(bench)
    came: Counter[str] = Counter()
    failures = []
    for fault, at in every:
        try:
            came[check(bench, fault, at)] += 1
        except AssertionError as problem:
            failures.append(str(problem).splitlines()[0])
            with capsys.disabled():
                print(failures[-1], flush=True)
    with capsys.disabled():
        print(
            f"\n{row}: {len(bench.calls)} calls, {len(every)} faults: {dict(came)}, {len(failures)} failed", flush=True
        )
    assert not failures, "\n".join(failures)


def check_read(bench: Bench, call: Call, at: int) -> str:
    """A call that only looks, and that fails; what came of it."""
    bench.fresh()
    ended = bench.run("EIO", at, reads=True)
    where = f"{bench.row}, EIO at {call}: exit {ended.code}, {ended.err.strip()[-300:]}"
    assert ended.fired, where
    bits = bench.found()
    state = "after" if bits == bench.after else committed(bits, bench.before, bench.after)
    if ended.code == 0:
        assert state == "after" and not ended.err.startswith("error"), where
        return "survived"
    assert state or bench.row.resumes, where
    lines = ended.err.splitlines()
    assert ended.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), where
    assert "bug" not in lines[0], where
    # Some libraries say it by its number, one by another number or not at all.
    assert re.search(r"nput/output error|Errno 5|though it is there|cannot be read \(", lines[0]), where
    if state == "after" and not bench.row.bit_by_bit:
        assert "is committed" in lines[0] or "is written" in lines[0], where
    return "refused"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_read(row, injector, inputs, tmp_path, capsys):
    """An input/output error at each kind of look at each file."""
    bench = Bench(row, injector, inputs, tmp_path)
    bench.fresh()
    looks: dict[Call, int] = {}
    for at, call in enumerate(bench.run(reads=True).calls):
        if call.name in READS:
            looks.setdefault(call, at)
    came: Counter[str] = Counter()
    failures = []
    for call, at in looks.items():
        try:
            came[check_read(bench, call, at)] += 1
        except AssertionError as problem:
            failures.append(str(problem).splitlines()[0])
    with capsys.disabled():
        print(f"\n{row}: {len(looks)} looks: {dict(came)}, {len(failures)} failed", *failures, sep="\n", flush=True)
    assert not failures, "\n".join(failures)


def test_every_command_has_a_row():
    from typer.main import get_command

    from mergeway.cli.app import app, main

    main(["--version"])
    rows = {row.name.split()[0] for row in ROWS}
    unknown = set(get_command(app).commands) - rows - LOOKING - set(ELSEWHERE)  # pyright: ignore[reportAttributeAccessIssue]
    assert not unknown, "add a row to tests/faults/commands.py, or say why there is none"
