"""Readers, writers and copies at the same time, a writer that is stopped, and file systems that lack something."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mergeway as mw

# Adds and rolls back until it is told to stop; prints how many changes it has committed.
WRITER = """
import sys, torch
torch.set_num_threads(1)
import mergeway as mw
path, arrivals = sys.argv[1], sys.argv[2:]
trunk, done = mw.Trunk.open(path, threads=1), 0
print("ready", flush=True)
for line in sys.stdin:
    held = {f.task for f in trunk.folded()}
    fresh = [a for a in arrivals if a.split("/")[-1].removesuffix(".safetensors") not in held]
    try:
        trunk.add(fresh[0]) if fresh else trunk.rollback(0)
        done += 1
    except mw.MergewayError as problem:
        if "the same weights" not in str(problem):  # the other writer was first
            raise
    print(done, flush=True)
"""

# Reads all the time: every look must be a whole step, and what it reads must be what the record says.
READER = """
import json, sys, torch
torch.set_num_threads(1)
import mergeway as mw
from mergeway.checkpoint.inspect import combine_digests
from mergeway.core.tensors import digest_tensor
trunk, looks, steps = mw.Trunk.open(sys.argv[1], threads=1), 0, set()
print("ready", flush=True)
for line in sys.stdin:
    deployed = trunk.deployed()
    found = combine_digests({n: digest_tensor(deployed.read(n)) for n in deployed.infos}, deployed.infos)
    results = [r.result for r in trunk.log()]
    assert found in results, found
    looks += 1
    steps.add(len(results))
    if looks % 5 == 0:
        assert trunk.verify() == [], trunk.verify()
    print(json.dumps([looks, len(steps)]), flush=True)
"""


class Worker:
    """A process that does one thing for each line it is sent, and keeps on by itself when many were sent at once."""

    def __init__(self, script: str, *words: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ready(self) -> Worker:
        assert self.process.stdout.readline() == "ready\n"
        return self

    def go(self, times: int) -> None:
        self.process.stdin.write("go\n" * times)
        self.process.stdin.flush()

    def end(self) -> str:
        """Its last word."""
        self.process.stdin.close()
        lines = self.process.stdout.read().splitlines()
        self.process.stdout.close()
        assert self.process.wait(timeout=600) == 0, "a process beside the others failed"
        return lines[-1]


def side_by_side(stream, tmp_path: Path, seconds: float) -> tuple[int, int, int]:
    """Two writers and two readers, and copies taken all the while; changes, looks and copies."""
    s = stream(4)
    trunk = tmp_path / "trunk"
    mw.Trunk.create(trunk, s.base, "opcm", keep=2)
    writers = [Worker(WRITER, trunk, *s.arrivals).ready() for _ in range(2)]
    readers = [Worker(READER, trunk).ready() for _ in range(2)]
    until, copies = time.monotonic() + seconds, [0, 0]
    while True:
        for worker in (*writers, *readers):
            worker.go(3)
        copies[is_whole(trunk, tmp_path / "copy")] += 1
        if time.monotonic() > until:
            break
    changes = sum(int(w.end()) for w in writers)
    looks = [json.loads(r.end()) for r in readers]
    records = mw.Trunk.open(trunk).log()
    assert len(records) == changes + 1, "a commit was lost, or counted twice"
    assert mw.Trunk.open(trunk).verify() == []
    assert max(steps for _, steps in looks) > 1, "no reader saw a change"
    return changes, sum(n for n, _ in looks), sum(copies)


def is_whole(trunk: Path, copy: Path) -> bool:
    """A copy taken while somebody writes verifies, or `verify` says that it does not; then a second copy is due."""
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(trunk, copy)
    except (shutil.Error, FileNotFoundError):  # a file was dropped under the copier's eyes
        return False
    try:
        problems = mw.Trunk.open(copy, threads=1).verify()
    except mw.MergewayError:
        return False
    if problems:
        return False
    copied, found = mw.Trunk.open(copy, threads=1), mw.Trunk.open(trunk).log()
    assert copied.log() == found[: len(copied.log())]
    copied.params()
    return True


def test_readers_writers_and_copies(stream, tmp_path):
    changes, looks, copies = side_by_side(stream, tmp_path, 0.5)
    assert changes and looks and copies


@pytest.mark.slow
def test_readers_writers_and_copies_for_a_minute(stream, tmp_path, capsys):
    changes, looks, copies = side_by_side(stream, tmp_path, 60)
    with capsys.disabled():
        print(f"\n{changes} changes by two writers, {looks} looks by two readers, {copies} copies", flush=True)


def test_a_stopped_lock_holder(stream, tmp_path, call):
    """Nobody breaks a lock that is held: readers read, `--no-wait` says so, and the end of the holder frees it."""
    s = stream(2)
    trunk = tmp_path / "trunk"
    mw.Trunk.create(trunk, s.base, "average").add(s.arrivals[0])
    holder = "import fcntl, sys, time\nf = open(sys.argv[1], 'a')\nfcntl.flock(f, 2)\nprint('held', flush=True)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", holder, trunk / "lock"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGSTOP)
    try:
        line = call("add", trunk, s.arrivals[1], "--no-wait").mistake()
        assert "another process is writing to the trunk" in line and "try again later" in line
        assert len(call("log", trunk, "--json").json()) == 2
        call("verify", trunk).ok()
        call("export", trunk, tmp_path / "out").ok()
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    call("add", trunk, s.arrivals[1], "--no-wait").ok()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_a_file_system_without_hard_links(stream, tmp_path, call, monkeypatch, code):
    """A rollback copies where it cannot link."""
    s = stream(2)
    trunk = tmp_path / "trunk"
    made = mw.Trunk.create(trunk, s.base, "average", keep=3)
    first = made.add(s.arrivals[0])
    made.add(s.arrivals[1])

    def link(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    assert call("rollback", trunk, 1, "--json").json()["result"] == first.result
    assert made.verify() == []
    files = [trunk / "steps" / step / "model.safetensors" for step in ("000001", "000003")]
    assert files[0].read_bytes() == files[1].read_bytes() and files[0].stat().st_ino != files[1].stat().st_ino
