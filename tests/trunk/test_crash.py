"""A real `add`, killed at a hundred random moments: no commit is lost, and the trunk always verifies.

A process of its own imports mergeway once and forks a child for each trial, so that a trial costs as much as its fold. The
child is a process like any other: it takes the lock, folds, writes, commits, and is stopped by SIGKILL.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from shared import committed, draw_tensors

import mergeway as mw

TRIALS = 100
SHAPES = {f"layers.{k}.weight": (160, 160) for k in range(12)} | {"norm.bias": (160,)}

# Reads trials from stdin, one JSON list of trunk, arrival and delay each; answers how the child ended and how long it ran.
DRIVER = """
import json, os, random, signal, sys, time, torch
torch.set_num_threads(1)
import mergeway as mw
mw.rules, mw.Trunk
for line in sys.stdin:
    path, arrival, delay = json.loads(line)
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        try:
            mw.Trunk.open(path, threads=2).add(arrival)
            os._exit(0)
        except BaseException as problem:
            print(problem, file=sys.stderr, flush=True)
            os._exit(1)
    if delay is not None:
        time.sleep(max(0.0, delay - (time.perf_counter() - began)))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    print(json.dumps([code, time.perf_counter() - began]), flush=True)
"""


class Driver:
    """The process that forks the writers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def add(self, trunk: Path, arrival: Path, delay: float | None = None) -> tuple[int, float]:
        self.process.stdin.write(json.dumps([str(trunk), str(arrival), delay]) + "\n")
        self.process.stdin.flush()
        code, seconds = json.loads(self.process.stdout.readline())
        return code, seconds

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=60)


@pytest.fixture
def driver():
    made = Driver()
    yield made
    made.close()


def test_killed_at_a_hundred_moments(driver, tmp_path):
    arrivals = []
    for k in range(3):
        arrivals.append(tmp_path / f"{k}.safetensors")
        save_file(draw_tensors(k, SHAPES), arrivals[-1])
    start = tmp_path / "start"
    made = mw.Trunk.create(start, arrivals[0], "opcm", keep=1)
    made.add(arrivals[1])
    before = committed(start)

    whole = tmp_path / "whole"
    times = []
    for _ in range(3):
        shutil.rmtree(whole, ignore_errors=True)
        shutil.copytree(start, whole)
        code, seconds = driver.add(whole, arrivals[2])
        assert code == 0
        times.append(seconds)
    expected = mw.Trunk.open(whole).log()[-1]
    weights = load_file(whole / "steps" / "000002" / "model.safetensors")

    # Delays run through the whole of a fold and a little past its end. How long a fold takes drifts on a busy machine, so
    # the scale follows the outcomes: too many finished folds shorten it, too few lengthen it.
    scale = 1.1 * min(times)
    killed = finished = leftovers = 0
    for trial in range(TRIALS):
        trunk = tmp_path / "trial"
        shutil.copytree(start, trunk)
        # Steps of the golden ratio cover the range evenly whatever part of it a run of outcomes comes from.
        delay = scale * ((trial * 0.6180339887) % 1.0)
        code, _ = driver.add(trunk, arrivals[2], delay)
        assert code in (0, -9), f"trial {trial}: the writer failed by itself"
        opened = mw.Trunk.open(trunk)
        records = opened.log()
        problems = opened.verify()
        assert problems == [], f"trial {trial}, killed after {delay:.3f} s: {problems}"
        if code == -9:
            killed += 1
            assert len(records) in (2, 3)
        else:
            finished += 1
            assert len(records) == 3, f"trial {trial}: the writer was done and its commit is gone"
            scale *= 0.98
        if len(records) == 2:
            assert committed(trunk) == before, f"trial {trial}: the last commit was changed"
            leftovers += {p.name for p in (trunk / "steps").iterdir()} != {"000001"}
            # Every fifth one is repeated in full, by a writer that finds the leftovers.
            if trial % 5 == 0:
                opened.add(arrivals[2])
                scale *= 1.02
        else:
            assert records[2].result == expected.result
        if len(opened.log()) == 3:
            again = opened.log()[-1]
            assert (again.result, again.files, again.digest) == (expected.result, expected.files, expected.digest)
            ours = load_file(trunk / "steps" / "000002" / "model.safetensors")
            assert all(ours[n].equal(weights[n]) for n in weights)
            assert opened.verify() == []
        shutil.rmtree(trunk)
    # The delays did what they are for: kills before, in and after the work, most of them in the middle of it.
    assert killed >= 0.5 * TRIALS, f"{killed} killed, {finished} finished"
    assert leftovers >= 0.1 * TRIALS, f"only {leftovers} kills fell into the writing"


def test_a_writer_sweeps_what_a_killed_one_left(driver, tmp_path):
    """Killed as soon as it writes: the leftover is there, readers pass it by, and the next writer removes it."""
    arrivals = []
    for k in range(3):
        arrivals.append(tmp_path / f"{k}.safetensors")
        save_file(draw_tensors(k, SHAPES), arrivals[-1])
    trunk = tmp_path / "trunk"
    opened = mw.Trunk.create(trunk, arrivals[0], "average")
    for delay in [0.002 * k for k in range(1, 200)]:
        code, _ = driver.add(trunk, arrivals[1], delay)
        left = [p.name for p in (trunk / "steps").iterdir() if not p.name.isdigit()]
        if left or code == 0:
            break
    assert left, "no kill fell into the writing"
    assert opened.verify() == []
    opened.params()
    opened.add(arrivals[2])
    assert [p.name for p in (trunk / "steps").iterdir()] == [f"{len(opened.log()) - 1:06d}"]
    assert not list(trunk.glob("*.new"))


def test_leftovers_of_every_kind_are_swept(stream, tmp_path):
    """The states between two system calls that a random kill seldom meets, made by hand."""
    s = stream(3)
    trunk = tmp_path / "trunk"
    opened = mw.Trunk.create(trunk, s.base, "average", keep=1)
    opened.add(s.arrivals[0])
    old_head = (trunk / "head").read_text()
    opened.add(s.arrivals[1])
    # Killed after the journal and before the head, with the old snapshot not yet dropped.
    (trunk / "head").write_text(old_head)
    shutil.copytree(trunk / "steps" / "000002", trunk / "steps" / "dropped-1")
    # Killed after the snapshot's rename and before the journal's, with both temporary files there.
    shutil.copytree(trunk / "steps" / "000002", trunk / "steps" / "000003")
    shutil.copytree(trunk / "steps" / "000002", trunk / "steps" / "next-12345")
    (trunk / "journal.jsonl.new").write_text("half a rec")
    (trunk / "head.new").write_text("")
    (trunk / "base.json.12345.new").mkdir()
    (trunk / "base.json.12345.new" / "base.json").write_text("{")
    assert opened.verify() == []
    assert len(opened.log()) == 3
    record = opened.add(s.arrivals[2])
    assert record.step == 3
    assert opened.verify() == []
    assert {p.name for p in trunk.iterdir()} - {"lock", "base.seen"} == {"trunk.json", "journal.jsonl", "head", "steps"}
    assert [p.name for p in (trunk / "steps").iterdir()] == ["000003"]
    assert (trunk / "head").read_text() != old_head
    merged = mw.merge(s.base, s.arrivals, "average")
    assert all(t.equal(merged[n]) for n, t in opened.params().items())
