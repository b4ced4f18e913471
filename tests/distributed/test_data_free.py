"""Data-free rules on two ranks: the bits of one rank, and the last commit when a rank dies."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torchrun
from shared import SHAPES, listing

import mergeway as mw

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def files(folder):
    return {name.removeprefix(str(folder)): digest for name, digest in listing(folder).items()}


@pytest.mark.parametrize("rule", ["ties", "iso"])
def test_merge_writes_the_same_files(tmp_path, stream, rule):
    """A rule that surveys and one that settles, into shards."""
    made = stream(3)
    words = [made.base, *made.arrivals, "--rule", rule, "--weights", "1,2,1", "--shard-size", "600B"]
    code, out, err = torchrun.finish(torchrun.start("merge", *words, "--out", tmp_path / "two"))
    assert code == 0, err
    assert out.count(f"merged by {rule}") == 1
    mw.merge_into(tmp_path / "one", made.base, made.arrivals, rule, [1, 2, 1], shard_size=600)
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    one.pop("/README.md"), two.pop("/README.md")  # it says which command was typed
    assert one == two
    assert sum(name.endswith(".safetensors") for name in two) > 1


def test_add_commits_the_same_snapshot(tmp_path, stream):
    made = stream(2)
    for name in ("one", "two"):
        mw.Trunk.create(tmp_path / name, made.base, "opcm").add(made.arrivals[0], "first")
    mw.Trunk.open(tmp_path / "one").add(made.arrivals[1], "second", 2.0)
    code, out, err = torchrun.finish(
        torchrun.start("add", tmp_path / "two", made.arrivals[1], "--task", "second", "--weight", 2)
    )
    assert code == 0, err
    assert out.count("step 2 add second") == 1
    one, two = mw.Trunk.open(tmp_path / "one"), mw.Trunk.open(tmp_path / "two")
    assert one.log()[-1].files == two.log()[-1].files
    assert one.log()[-1].result == two.log()[-1].result
    assert two.verify() == []


def test_a_mistake_is_one_line_of_the_lead(tmp_path, stream):
    made = stream(1)
    mw.Trunk.create(tmp_path / "trunk", made.base, "average").add(made.arrivals[0], "first")
    before = listing(tmp_path / "trunk")
    code, _, err = torchrun.finish(torchrun.start("add", tmp_path / "trunk", made.arrivals[0]))
    assert code != 0
    assert err.count("error: ") == 1
    assert "pass --again to count them once more" in err
    assert listing(tmp_path / "trunk") == before


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_the_job(tmp_path, stream, victim):
    made = stream(2, shapes={**SHAPES, **{f"more.{k}.weight": (96, 96) for k in range(40)}})
    trunk = mw.Trunk.create(tmp_path / "trunk", made.base, "dop", steps=3)
    trunk.add(made.arrivals[0], "first")
    slow = mw.Trunk.create(tmp_path / "slow", made.base, "dop", steps=3000)
    slow.add(made.arrivals[0], "first")
    before = slow.log()[-1]
    job = torchrun.start("add", tmp_path / "slow", made.arrivals[1], "--task", "second")
    until = time.monotonic() + 120
    while not list((tmp_path / "slow" / "steps").glob("next-*/state.safetensors")):
        assert time.monotonic() < until and job.poll() is None
        time.sleep(0.05)
    pid = torchrun.rank_of(job, victim)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    code, _, err = torchrun.finish(job)
    assert code != 0
    assert "error: another rank of this job" in err
    assert slow.log()[-1] == before
    assert slow.verify() == []
    # The trunk is as good as new: the next add sweeps what was left behind.
    trunk.add(made.arrivals[1], "second")
    slow.rollback(0)
    assert not list((tmp_path / "slow" / "steps").glob("next-*"))


def test_other_commands_run_on_one_process(tmp_path):
    code, _, err = torchrun.finish(torchrun.start("rules"))
    assert code != 0
    assert "'rules' runs on one process" in err
