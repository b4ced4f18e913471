"""The trunk: every command of its life, the same bits as `merge`, and what it does when the machine fails it."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shared import DATA_FREE, draw_tensors, listing

import mergeway as mw
from mergeway.core.progress import Progress
from mergeway.errors import OptionError, TrunkError, TrunkLocked

RULES = DATA_FREE


def quick(rule: str) -> mw.rules.Rule:
    """The rule with its defaults, except that DOP's optimiser takes few steps."""
    return mw.rules.make(rule, {"steps": 10} if rule == "dop" else {})


def assert_same(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.fixture
def trunk(stream, tmp_path, call):
    """A trunk of three folds by `average` with weights 1, 2, 3, and the stream it was made from."""
    s = stream(3)
    path = tmp_path / "trunk"
    call("init", path, "--base", s.base, "--rule", "average").ok()
    for k, arrival in enumerate(s.arrivals, 1):
        call("add", path, arrival, "--weight", k).ok()
    return path, s


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_folds_into_a_trunk_are_the_bits_of_merge(stream, tmp_path, rule):
    s = stream(4)
    weights = [1.0, 2.0, 0.5, 1.5]
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, quick(rule))
    for arrival, weight in zip(s.arrivals, weights, strict=True):
        mw.Trunk.open(tmp_path / "trunk").add(arrival, weight=weight)
    whole = mw.merge(s.base, s.arrivals, quick(rule), weights)
    assert_same(trunk.params(), whole)
    mw.merge_into(tmp_path / "out", s.base, s.arrivals, quick(rule), weights)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), whole)
    assert trunk.verify() == []


def test_the_tensors_of_a_trunk_are_the_callers_to_change(trunk):
    opened = mw.Trunk.open(trunk[0])
    before = opened.params()
    for tensor in opened.params().values():
        tensor.zero_()
    assert_same(opened.params(), before)
    assert opened.verify() == []


@pytest.mark.parametrize("rule", RULES)
def test_sharded_checkpoints_give_the_bits_of_whole_ones(stream, tmp_path, rule):
    s = stream(3)
    refs = []
    for k, tensors in enumerate((s.base_tensors, *s.arrival_tensors)):
        folder = tmp_path / f"sharded{k}"
        folder.mkdir()
        names = sorted(tensors, reverse=bool(k % 2))
        shards = {f"s{i}.safetensors": names[i :: k + 2] for i in range(k + 2)}
        for label, part in shards.items():
            save_file({n: tensors[n] for n in part}, folder / label)
        weight_map = {n: label for label, part in shards.items() for n in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        refs.append(folder)
    assert_same(mw.merge(refs[0], refs[1:], quick(rule)), mw.merge(s.base, s.arrivals, quick(rule)))


@pytest.mark.parametrize("rule", RULES)
def test_folding_again_after_a_rollback_gives_the_same_bits(stream, tmp_path, rule):
    s = stream(3)
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, quick(rule))
    results = [trunk.add(arrival).result for arrival in s.arrivals]
    assert trunk.rollback(2).result == results[1]
    again = trunk.add(s.arrivals[2])
    assert again.result == results[2]
    assert_same(trunk.params(), mw.merge(s.base, s.arrivals, quick(rule)))
    trunk.rollback(0)
    assert_same(trunk.params(), s.base_tensors)
    assert [trunk.add(arrival).result for arrival in s.arrivals] == results
    assert trunk.verify() == []


# --- the commands ----------------------------------------------------------------------------------------------------


def test_log_json_has_the_designed_fields(trunk, call):
    path, s = trunk
    records = call("log", path, "--json").json()
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert [r["kind"] for r in records] == ["init", "add", "add", "add"]
    for record, arrival in zip(records[1:], s.arrivals, strict=True):
        assert {"step", "task", "source", "digest", "weight", "result"} <= record.keys()
        assert record["task"] == arrival.stem
        assert record["source"] == str(arrival)
        assert record["weight"] == record["step"]
        assert len(record["digest"]) == len(record["result"]) == 64
    assert len({r["digest"] for r in records}) == len({r["result"] for r in records}) == 4
    for before, record in itertools.pairwise(records):
        assert record["previous"] == before["hash"]


def test_log_reads_newest_first(trunk, call):
    path, s = trunk
    text = call("log", path).ok().out
    assert text.index("step 3") < text.index("step 2") < text.index("step 1") < text.index("step 0")
    newest = text[: text.index("step 2")]
    assert (
        "add task3" in newest and "deployed" in newest and str(s.arrivals[2]) in newest and "weight   3 of 6" in newest
    )


def test_show(trunk, call):
    path, s = trunk
    last = call("show", path, "--json").json()
    assert last == call("show", path, 3, "--json").json()
    assert [(f["task"], f["weight"]) for f in last["folded"]] == [("task1", 1), ("task2", 2), ("task3", 3)]
    first = call("show", path, 1, "--json").json()
    assert [f["task"] for f in first["folded"]] == ["task1"]
    text = call("show", path).ok().out
    assert "average" in text and "50.0 %" in text and str(s.base) in text


def test_show_tells_what_the_rule_found(stream, tmp_path, call):
    s = stream(2)
    call("init", tmp_path / "t", "--base", s.base, "--rule", "opcm", "--set", "alpha=0.25").ok()
    for arrival in s.arrivals:
        call("add", tmp_path / "t", arrival).ok()
    shown = call("show", tmp_path / "t", "--json").json()
    assert shown["details"]["facts"]["lambda"] > 1
    text = call("show", tmp_path / "t").ok().out
    assert "lambda" in text and "alpha=0.25" in text


def test_export_is_the_deployed_model(trunk, call, tmp_path):
    path, _ = trunk
    done = call("export", path, tmp_path / "out", "--json").json()
    assert done == {"out": str(tmp_path / "out"), "step": 3, "result": mw.Trunk.open(path).log()[-1].result}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), mw.Trunk.open(path).params())


def test_a_trunk_without_folds_deploys_the_base(stream, tmp_path, call):
    s = stream(1)
    call("init", tmp_path / "t", "--base", s.base, "--rule", "opcm").ok()
    call("export", tmp_path / "t", tmp_path / "out").ok()
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), s.base_tensors)
    call("verify", tmp_path / "t").ok()


def test_rollback_is_a_record(trunk, call):
    path, s = trunk
    before = call("log", path, "--json").json()
    record = call("rollback", path, 2, "--json").json()
    assert (record["step"], record["kind"], record["details"]["to"]) == (4, "rollback", 2)
    assert record["result"] == before[2]["result"]
    assert call("log", path, "--json").json() == [*before, record]
    assert [f["task"] for f in call("show", path, "--json").json()["folded"]] == ["task1", "task2"]
    call("add", path, s.arrivals[2], "--weight", 9).ok()
    assert_same(mw.Trunk.open(path).params(), mw.merge(s.base, s.arrivals, "average", [1, 2, 9]))
    call("verify", path).ok()


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_keep(stream, tmp_path, call, keep):
    s = stream(5)
    path = tmp_path / "t"
    call("init", path, "--base", s.base, "--rule", "average", "--keep", keep).ok()
    for arrival in s.arrivals:
        call("add", path, arrival).ok()
    kept = list(range(6 - keep, 6))
    assert sorted(int(p.name) for p in (path / "steps").iterdir()) == kept
    assert mw.Trunk.open(path).kept_steps() == [0, *kept]
    if keep < 5:
        line = call("rollback", path, 5 - keep).mistake()
        assert "no longer kept" in line and f"0, {', '.join(map(str, kept))}" in line
    call("rollback", path, kept[0]).ok()
    call("verify", path).ok()


def test_the_same_arrival_twice(trunk, call, tmp_path):
    path, s = trunk
    shutil.copy(s.arrivals[0], tmp_path / "copy.safetensors")
    line = call("add", path, tmp_path / "copy.safetensors").mistake()
    assert "step 1" in line and "task1" in line and "--again" in line
    call("add", path, s.arrivals[0], "--again", "--weight", 4).ok()
    assert mw.Trunk.open(path).folded()[-1].task == "task1-2"
    doubled = [*s.arrivals, s.arrivals[0]]
    assert_same(mw.Trunk.open(path).params(), mw.merge(s.base, doubled, "average", [1, 2, 3, 4]))


def test_an_arrival_that_was_rolled_back_may_come_again(trunk, call):
    path, s = trunk
    call("rollback", path, 2).ok()
    call("add", path, s.arrivals[2]).ok()


# --- remove ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["average", "task-arithmetic", "iso", "iso scaling=auto"])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_remove_restores_the_stream_without_the_arrival(stream, tmp_path, call, rule, gone):
    s = stream(3)
    path = tmp_path / "t"
    weights = [1.0, 2.5, 0.5]
    rule, *options = rule.split()
    call("init", path, "--base", s.base, "--rule", rule, *(w for o in options for w in ("--set", o))).ok()
    rule = mw.rules.make(rule, dict(o.split("=") for o in options))
    for arrival, weight in zip(s.arrivals, weights, strict=True):
        call("add", path, arrival, "--weight", weight).ok()
    record = call("remove", path, f"task{gone + 1}", "--from", s.arrivals[gone], "--json").json()
    assert (record["kind"], record["task"], record["weight"]) == ("remove", f"task{gone + 1}", weights[gone])
    left = [k for k in range(3) if k != gone]
    expected = mw.merge(s.base, [s.arrivals[k] for k in left], rule, [weights[k] for k in left])
    ours = mw.Trunk.open(path).params()
    for name, tensor in expected.items():
        update = (tensor - s.base_tensors[name]).double()
        off = (ours[name] - tensor).double().norm()
        assert off <= 1e-5 * (update.norm() + 1e-3), name
    assert [f.task for f in mw.Trunk.open(path).folded()] == [f"task{k + 1}" for k in left]
    call("verify", path).ok()
    # The stream goes on from there.
    call("add", path, s.arrivals[gone], "--weight", 4).ok()
    order = [*left, gone]
    whole = mw.merge(s.base, [s.arrivals[k] for k in order], rule, [weights[k] for k in left] + [4.0])
    for name, tensor in mw.Trunk.open(path).params().items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-5, atol=1e-6)


def test_removing_the_last_arrival_leaves_the_base(stream, tmp_path, call):
    s = stream(1)
    path = tmp_path / "t"
    call("init", path, "--base", s.base, "--rule", "average").ok()
    first = call("add", path, s.arrivals[0], "--json").json()
    call("remove", path, "task1", "--from", s.arrivals[0]).ok()
    assert_same(mw.Trunk.open(path).params(), s.base_tensors)
    assert call("add", path, s.arrivals[0], "--json").json()["result"] == first["result"]
    call("verify", path).ok()


# --- one writer, many readers ----------------------------------------------------------------------------------------


@pytest.fixture
def locked(trunk):
    """The trunk with its lock held, as a writer in another process holds it."""
    path, s = trunk
    with open(path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path, s


def test_no_wait_fails_at_once(locked, call, tmp_path):
    path, s = locked
    before = listing(path)
    extra = tmp_path / "extra.safetensors"
    save_file(s.arrival_tensors[0] | {"layer.bias": torch.zeros(6)}, extra)
    for words in (["add", path, extra], ["remove", path, "task1", "--from", s.arrivals[0]], ["rollback", path, 2]):
        assert "another process is writing" in call(*words, "--no-wait").mistake()
    assert listing(path) == before
    with pytest.raises(TrunkLocked):
        mw.Trunk.open(path).rollback(2, wait=False)


def test_readers_work_while_a_writer_holds_the_lock(locked, call, tmp_path):
    path, _ = locked
    call("log", path).ok()
    call("show", path).ok()
    call("verify", path).ok()
    call("export", path, tmp_path / "out").ok()


def test_a_second_writer_waits_and_says_so(trunk):
    path, _ = trunk
    with open(path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        words = [sys.executable, "-m", "mergeway", "rollback", path, "2"]
        process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert "waiting for another process" in process.stderr.readline()
        assert process.poll() is None
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "rollback to step 2" in out


def test_two_writers_at_once_lose_nothing(stream, tmp_path):
    s = stream(16)
    path = tmp_path / "t"
    mw.Trunk.create(path, s.base, "average")
    script = "import sys, mergeway as mw; t = mw.Trunk.open(sys.argv[1]); print(1, flush=True); [t.add(a) for a in sys.argv[2:]]"
    words = [sys.executable, "-c", script, path, *s.arrivals[:8]]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        for arrival in s.arrivals[8:]:
            mw.Trunk.open(path).add(arrival)
    assert process.returncode == 0
    trunk = mw.Trunk.open(path)
    assert sorted(f.task for f in trunk.folded()) == sorted(a.stem for a in s.arrivals)
    assert trunk.verify() == []
    in_order = [f.source for f in trunk.folded()]
    assert_same(trunk.params(), mw.merge(s.base, in_order, "average"))


def test_readers_never_see_a_half_made_step(stream, tmp_path):
    """Reading and verifying again and again while steps are added and dropped under the reader's feet."""
    s = stream(2)
    path = tmp_path / "t"
    trunk = mw.Trunk.create(path, s.base, "average", keep=1)
    trunk.add(s.arrivals[0])
    done, problems = threading.Event(), []

    def read() -> None:
        reader = mw.Trunk.open(path, threads=1)
        while not done.is_set():
            problems.extend(reader.verify())
            assert reader.params()

    thread = threading.Thread(target=read)
    thread.start()
    for k in range(12):
        trunk.add(s.arrivals[k % 2], task=f"t{k}", again=True)
    done.set()
    thread.join()
    assert problems == []


@pytest.mark.parametrize("moment", range(5))
def test_a_snapshot_dropped_while_it_is_verified(stream, tmp_path, moment):
    """A writer drops the older of two snapshots between any two files that the reader looks at."""
    s = stream(2)
    trunk = mw.Trunk.create(tmp_path / "t", s.base, "average", keep=2)
    for arrival in s.arrivals:
        trunk.add(arrival)
    old = sorted((tmp_path / "t" / "steps").iterdir())[0]

    class Dropping(Progress):
        seen = 0

        def begin(self, what: str, total: int | None, unit: str) -> None:
            if self.seen == moment and old.exists():
                shutil.rmtree(old)
            self.seen += 1

    watched = Dropping()
    assert mw.Trunk.open(tmp_path / "t", threads=1, progress=watched).verify() == []
    assert watched.seen > 3


# --- when the machine fails it ---------------------------------------------------------------------------------------


def refuse_and_leave_unharmed(path: Path, done, before) -> str:
    line = done.mistake()
    after = {name: digest for name, digest in listing(path).items() if not name.endswith("/lock")}
    assert after == {name: digest for name, digest in before.items() if not name.endswith("/lock")}
    return line


@pytest.mark.parametrize("limit", [100, 600, 2000])
def test_a_write_that_is_cut_off(trunk, call, tmp_path, limit):
    """The operating system refuses to let a file grow: in a snapshot's header, in its data, in the journal."""
    path, _ = trunk
    before = listing(path)
    extra = tmp_path / "extra.safetensors"
    save_file(draw_tensors(50), extra)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        done = call("add", path, extra)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written" in refuse_and_leave_unharmed(path, done, before)
    call("verify", path).ok()
    call("add", path, extra).ok()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, a few hundred kilobytes large."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_disk_full(small_disk, tmp_path, call):
    shapes = {"layer.weight": (100, 100), "layer.bias": (100,)}
    for k in range(4):
        save_file(draw_tensors(k, shapes), tmp_path / f"{k}.safetensors")
    path = small_disk / "trunk"
    call("init", path, "--base", tmp_path / "0.safetensors", "--rule", "average").ok()
    call("add", path, tmp_path / "1.safetensors").ok()
    (small_disk / "filler").write_bytes(b"x" * 190_000)
    before = listing(path)
    done = call("add", path, tmp_path / "2.safetensors")
    assert "no space left" in refuse_and_leave_unharmed(path, done, before)
    done = call("export", path, small_disk / "out")
    assert "no space left" in refuse_and_leave_unharmed(path, done, before)
    assert not (small_disk / "out").exists()
    call("verify", path).ok()
    (small_disk / "filler").unlink()
    call("add", path, tmp_path / "2.safetensors").ok()
    call("verify", path).ok()


def test_no_space_for_the_journal(small_disk, tmp_path, call):
    """The snapshot fits and its record does not: the step has not happened."""
    shapes = {"layer.weight": (30, 30)}
    for k in range(3):
        save_file(draw_tensors(k, shapes), tmp_path / f"{k}.safetensors")
    path = small_disk / "trunk"
    call("init", path, "--base", tmp_path / "0.safetensors", "--rule", "average").ok()
    first = call("add", path, tmp_path / "1.safetensors", "--json").json()
    while (path / "journal.jsonl").stat().st_size % 4096 < 3700:  # so that the next record needs a page of its own
        call("rollback", path, 0).ok()
    before = listing(path)
    refused = 0
    for pages in range(12):
        free = os.statvfs(small_disk).f_bavail - pages
        (small_disk / "filler").write_bytes(b"x" * 4096 * max(free, 0))
        done = call("add", path, tmp_path / "2.safetensors")
        (small_disk / "filler").unlink()
        if done.code == 0:
            break
        refuse_and_leave_unharmed(path, done, before)
        refused += 1
    assert done.code == 0 and refused > 3
    assert [r["result"] for r in call("log", path, "--json").json()][1] == first["result"]
    call("verify", path).ok()


def test_read_only_directory(trunk, call, tmp_path):
    path, s = trunk
    if os.geteuid() == 0:
        done = subprocess.run(["mount", "--bind", path, path], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"root is not stopped by permissions, and a bind mount fails: {done.stderr.strip()}")
        subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
    else:
        for folder in (path, path / "steps"):
            folder.chmod(0o555)
    try:
        before = listing(path)
        for words in (["add", path, s.base], ["rollback", path, 2], ["remove", path, "task1", "--from", s.arrivals[0]]):
            refuse_and_leave_unharmed(path, call(*words), before)
        for words in (["log", path], ["show", path], ["verify", path], ["export", path, tmp_path / "out"]):
            call(*words).ok()
        call("export", path, path / "out").mistake()
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", path], check=True)
        else:
            for folder in (path, path / "steps"):
                folder.chmod(0o755)
    call("verify", path).ok()


def test_missing_base(trunk, call):
    path, s = trunk
    before = listing(path)
    s.base.rename(s.base.with_name("elsewhere"))
    line = refuse_and_leave_unharmed(path, call("add", path, s.arrivals[0], "--again"), before)
    assert "base" in line and str(s.base) in line
    assert str(s.base) in call("verify", path).ok().err  # a note: the trunk itself is intact
    call("log", path).ok()
    s.base.with_name("elsewhere").rename(s.base)
    call("verify", path).ok()


def test_changed_base(trunk, call):
    path, s = trunk
    before = listing(path)
    original = s.base.read_bytes()
    save_file(s.base_tensors | {"layer.bias": torch.zeros(6)}, s.base)
    line = refuse_and_leave_unharmed(path, call("add", path, s.arrivals[0], "--again"), before)
    assert "has changed since 'init'" in line
    refuse_and_leave_unharmed(path, call("remove", path, "task1", "--from", s.arrivals[0]), before)
    assert "has changed since 'init'" in call("verify", path).mistake()
    s.base.write_bytes(original)
    call("verify", path).ok()


def test_a_moved_trunk_still_works(trunk, call, tmp_path):
    path, s = trunk
    path.rename(tmp_path / "moved")
    call("add", tmp_path / "moved", s.arrivals[0], "--again").ok()
    call("verify", tmp_path / "moved").ok()


def test_wrong_format_version(trunk, call):
    path, s = trunk
    settings = path / "trunk.json"
    settings.write_text(settings.read_text().replace('"format": 3', '"format": 4'))
    before = listing(path)
    for words in (["add", path, s.arrivals[0]], ["log", path], ["verify", path]):
        assert "format 3" in refuse_and_leave_unharmed(path, call(*words), before)


# --- from Python -----------------------------------------------------------------------------------------------------


def test_python_interface(stream, tmp_path):
    s = stream(2)
    trunk = mw.Trunk.create(tmp_path / "t", base=s.base, rule=mw.rules.Opcm(alpha=0.5))
    step = trunk.add(s.arrivals[0], task="svhn", weight=2.0)
    assert (step.step, step.task, step.weight) == (1, "svhn", 2.0)
    trunk.add(s.arrival_tensors[1], task="dict")
    assert [r.kind for r in mw.Trunk.open(tmp_path / "t").log()] == ["init", "add", "add"]
    trunk.rollback(1)
    assert trunk.export(tmp_path / "out") == tmp_path / "out"
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), trunk.params())
    assert trunk.params()["layer.bias"].equal(mw.merge(s.base, s.arrivals[:1], "opcm", [2.0])["layer.bias"])


def test_python_mistakes(stream, tmp_path):
    s = stream(1)
    with pytest.raises(OptionError, match="keep"):
        mw.Trunk.create(tmp_path / "t", s.base, keep=0)
    with pytest.raises(TrunkError, match="save the model first"):
        mw.Trunk.create(tmp_path / "t", s.base_tensors)
    with pytest.raises(OptionError, match="already has its own"):
        mw.Trunk.create(tmp_path / "t", s.base, mw.rules.Opcm(), alpha=0.5)
    assert not (tmp_path / "t").exists()


def test_waiting_is_what_happens_by_default(trunk):
    """From Python as well: the second writer goes on when the first is done."""
    path, _ = trunk
    held = open(path / "lock", "w")  # noqa: SIM115 - closed below, while the other waits
    fcntl.flock(held, fcntl.LOCK_EX)
    done = []
    thread = threading.Thread(target=lambda: done.append(mw.Trunk.open(path).rollback(2).kind))
    thread.start()
    time.sleep(0.2)
    assert done == []
    held.close()
    thread.join(timeout=60)
    assert done == ["rollback"]
