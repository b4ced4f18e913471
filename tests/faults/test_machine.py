"""A trunk against a model of it in a dictionary: whatever is done to it in whatever order, by whomever, killed or not."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from injector import WRITES, Call, Injector, why_not
from safetensors.numpy import load_file, save_file
from shared import draw_tensors

import mergeway as mw
from mergeway.errors import TrunkError, TrunkLocked

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

KEEP = 3
KILLS, LIVES = 1000, 20
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0])
Arrays = dict[str, np.ndarray]


@dataclass
class Step:
    """A record as the model knows it: what was done, which arrivals the deployed model then holds, and the model."""

    kind: str
    held: dict[str, float]
    deployed: Arrays


@dataclass
class Model:
    """What a trunk by `average` should be."""

    base: Arrays
    experts: dict[str, Arrays]
    steps: list[Step] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)

    def mean(self, held: dict[str, float]) -> Arrays:
        """The base and the weighted mean of the updates, in float64."""
        total = sum(held.values()) or 1.0
        return {
            n: b + sum(w / total * (self.experts[t][n].astype(np.float64) - b) for t, w in held.items())
            for n, b in self.base.items()
        }

    def grow(self, kind: str, held: dict[str, float], deployed: Arrays, bare: bool) -> None:
        self.steps.append(Step(kind, held, deployed))
        if not bare:
            self.snapshots.append(len(self.steps) - 1)
        self.snapshots = self.snapshots[-KEEP:]

    @property
    def last(self) -> Step:
        return self.steps[-1]

    def kept(self) -> list[int]:
        bare = [k for k, s in enumerate(self.steps) if not s.held]
        return sorted({*bare, *self.snapshots})


class Folder:
    """A trunk on disk beside its model; changes come from here or from other processes."""

    def __init__(self, suite: Path, injector: Injector) -> None:
        self.suite, self.injector = suite, injector
        self.root = Path(tempfile.mkdtemp(prefix="machine-"))
        self.path = self.root / "trunk"
        self.trunk = mw.Trunk.create(self.path, suite / "base", "average", keep=KEEP, threads=1)
        experts = {t: load_file(suite / "experts" / t / "model.safetensors") for t in tiny.TASKS}
        self.model = Model(load_file(suite / "base" / "model.safetensors"), experts)
        self.model.grow("init", {}, self.params(), bare=True)

    def params(self) -> Arrays:
        return {n: t.numpy() for n, t in mw.Trunk.open(self.path).params().items()}

    def expert(self, task: str) -> Path:
        return self.suite / "experts" / task

    def data(self, task: str) -> tuple[Path, Path]:
        return self.suite / "data" / f"{task}.npz", self.suite / "heads" / f"{task}.safetensors"

    def added(self, task: str, weight: float) -> None:
        self._folded("add", {**self.model.last.held, task: weight})

    def removed(self, task: str) -> None:
        self._folded("remove", {t: w for t, w in self.model.last.held.items() if t != task})

    def _folded(self, kind: str, held: dict[str, float]) -> None:
        params, expected = self.params(), self.model.mean(held)
        for name, tensor in expected.items():
            np.testing.assert_allclose(params[name], tensor, atol=2e-6, err_msg=f"{name} after {kind}")
        self.model.grow(kind, held, params, bare=not held)

    def rolled_back(self, step: int) -> None:
        target = self.model.steps[step]
        self.model.grow("rollback", target.held, target.deployed, bare=not target.held)

    def aligned(self) -> None:
        self.model.grow("align", self.model.last.held, self.params(), bare=False)

    def check(self) -> None:
        """The trunk is what the model says, bit by bit from the second look on."""
        log = mw.Trunk.open(self.path).log()
        assert [r.kind for r in log] == [s.kind for s in self.model.steps]
        assert {f.task: f.weight for f in mw.Trunk.open(self.path).folded()} == self.model.last.held
        same(self.params(), self.model.last.deployed)

    def check_all(self) -> None:
        self.check()
        assert mw.Trunk.open(self.path, threads=1).verify() == []
        assert set(mw.Trunk.open(self.path).kept_steps()) >= set(self.model.kept())

    def close(self) -> None:
        shutil.rmtree(self.root)


def same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


class TrunkMachine(RuleBasedStateMachine):
    """Every change of a trunk, by this process or one that is killed; readers and a second writer beside it."""

    suite: Path
    injector: Injector

    @initialize()
    def begin(self) -> None:
        self.folder = Folder(self.suite, self.injector)

    def _free(self) -> list[str]:
        return [t for t in tiny.TASKS if t not in self.folder.model.last.held]

    def _some_free(self) -> bool:
        return bool(self._free())

    def _some_held(self) -> bool:
        return bool(self.folder.model.last.held)

    def _alignable(self) -> bool:
        last = self.folder.model.last
        return last.kind == "add" and len(last.held) >= 2

    @precondition(_some_free)
    @rule(number=st.integers(0, 9), weight=WEIGHTS)
    def add(self, number: int, weight: float) -> None:
        task = self._free()[number % len(self._free())]
        self.folder.trunk.add(self.folder.expert(task), weight=weight)
        self.folder.added(task, weight)

    @precondition(_some_held)
    @rule(number=st.integers(0, 9))
    def add_the_same_again(self, number: int) -> None:
        task = list(self.folder.model.last.held)[number % len(self.folder.model.last.held)]
        with pytest.raises(TrunkError, match="the same weights"):
            self.folder.trunk.add(self.folder.expert(task))

    @precondition(_some_held)
    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        task = list(self.folder.model.last.held)[number % len(self.folder.model.last.held)]
        self.folder.trunk.remove(task, self.folder.expert(task))
        self.folder.removed(task)

    @rule(number=st.integers(0, 20))
    def rollback(self, number: int) -> None:
        step = number % len(self.folder.model.steps)
        if step in self.folder.model.kept():
            self.folder.trunk.rollback(step)
            self.folder.rolled_back(step)
        elif step not in self.folder.trunk.kept_steps():  # a killed writer may not have come to drop it
            with pytest.raises(TrunkError, match="no longer kept"):
                self.folder.trunk.rollback(step)

    @precondition(_alignable)
    @rule()
    def align(self) -> None:
        task = list(self.folder.model.last.held)[-1]
        data, head = self.folder.data(task)
        self.folder.trunk.align(str(data), head)
        self.folder.aligned()

    @rule()
    def export(self) -> None:
        out = self.folder.root / "out"
        self.folder.trunk.export(out, force=True)
        same(load_file(out / "model.safetensors"), self.folder.model.last.deployed)

    @precondition(_some_free)
    @rule(at=st.integers(0, 60), fault=st.sampled_from(["kill", "torn write"]))
    def crash_in_add(self, at: int, fault: str) -> None:
        task = self._free()[0]
        crash(self.folder, ["add", self.folder.path, self.folder.expert(task)], fault, at)
        if len(mw.Trunk.open(self.folder.path).log()) > len(self.folder.model.steps):
            self.folder.added(task, 1.0)

    @precondition(_some_held)
    @rule(at=st.integers(0, 60))
    def crash_in_remove(self, at: int) -> None:
        task = next(iter(self.folder.model.last.held))
        crash(self.folder, ["remove", self.folder.path, task, "--from", self.folder.expert(task)], "kill", at)
        if len(mw.Trunk.open(self.folder.path).log()) > len(self.folder.model.steps):
            self.folder.removed(task)

    @rule(at=st.integers(0, 40))
    def crash_in_export(self, at: int) -> None:
        out = self.folder.root / "out"
        crash(self.folder, ["export", self.folder.path, out, "--force"], "kill", at)
        if out.exists():  # an earlier one or this one, whole
            load_file(out / "model.safetensors")

    @precondition(_some_free)
    @rule()
    def second_writer(self) -> None:
        with open(self.folder.path / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(TrunkLocked, match="another process is writing"):
                self.folder.trunk.add(self.folder.expert(self._free()[0]), wait=False)

    @rule()
    def reader_in_another_process(self) -> None:
        done = self.injector.run(["log", self.folder.path, "--json"], self.folder.root)
        assert [r["kind"] for r in json.loads(done.out)] == [s.kind for s in self.folder.model.steps]
        done = self.injector.run(["verify", self.folder.path, "--threads", 1], self.folder.root)
        assert done.code == 0, done.err

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.check_all()
            self.folder.close()


def crash(folder: Folder, words: list, fault: str, at: int) -> bool:
    """A command that is ended at a system call, or finishes before it; whether it was ended."""
    ended = folder.injector.run([*words, "--quiet"], folder.root, fault, at)
    assert ended.killed or ended.code == 0, ended.err
    return ended.killed


def run(machine: type[TrunkMachine], examples: int, steps: int) -> None:
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)


@pytest.fixture
def machine(inputs, injector) -> type[TrunkMachine]:
    return type("Machine", (TrunkMachine,), {"suite": inputs.suite, "injector": injector})


def test_a_few_histories(machine):
    run(machine, 5, 10)


@pytest.mark.slow
def test_many_histories(machine):
    run(machine, 100, 30)


class Life:
    """One trunk that lives through adds, removes, rollbacks and exports, each ended at a random call."""

    def __init__(self, folder: Folder, seed: int) -> None:
        self.folder, self._draw = folder, random.Random(seed)
        self._calls: dict[str, list[Call]] = {}  # of a command that came to its end
        self.killed = self.committed = 0

    def go_on(self) -> None:
        """One command, killed or not, and what is there after it."""
        words, done = self._choose()
        known = self._calls.get(words[0], [])
        fault = self._draw.choice(["kill", "torn write"]) if known else None  # the first time, only to learn the calls
        places = [k for k, call in enumerate(known) if fault == "kill" or call.name in WRITES]
        before = len(self.folder.model.steps)
        at = self._draw.choice(places) if places else 0
        ended = self.folder.injector.run([*words, "--quiet"], self.folder.root, fault, at)
        assert ended.killed or ended.code == 0, ended.err
        if not ended.killed:
            self._calls[words[0]] = ended.calls
        grown = len(mw.Trunk.open(self.folder.path).log()) - before
        assert grown in ((0, 1) if ended.killed and done else (int(done is not None),))
        if grown and done:
            done()
            self.committed += ended.killed
        self.killed += ended.killed
        self.folder.check_all()

    def _choose(self) -> tuple[list, Callable[[], None] | None]:
        """A command that makes sense now, and what the model then does; an export changes no step."""
        folder, draw = self.folder, self._draw
        free = [t for t in tiny.TASKS if t not in folder.model.last.held]
        held = list(folder.model.last.held)
        step = draw.choice(folder.model.kept())
        chosen: list[tuple[list, Callable[[], None] | None]] = [
            (["rollback", folder.path, step], lambda: folder.rolled_back(step)),
            (["export", folder.path, folder.root / "out", "--force"], None),
        ]
        if free:
            new = draw.choice(free)
            chosen.append((["add", folder.path, folder.expert(new)], lambda: folder.added(new, 1.0)))
        if held:
            old = draw.choice(held)
            words = ["remove", folder.path, old, "--from", folder.expert(old)]
            chosen.append((words, lambda: folder.removed(old)))
        return draw.choice(chosen)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A base and experts of a few plain tensors, laid out as in a suite."""
    folder, base = tmp_path_factory.mktemp("small"), draw_tensors(0)
    for number, name in enumerate(("base", *(f"experts/{task}" for task in tiny.TASKS))):
        (folder / name).mkdir(parents=True)
        change = 0.05 * number
        tensors = {n: t + change * draw_tensors(number)[n] for n, t in base.items()}
        save_file({n: t.numpy() for n, t in tensors.items()}, folder / name / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(LIVES))
def test_a_thousand_kills(small, injector, capsys, number):
    """In several lives, since whoever checks a whole journal after each of a thousand steps does little else."""
    life = Life(Folder(small, injector), number)
    while life.killed < KILLS // LIVES:
        life.go_on()
    with capsys.disabled():
        said = f"{life.killed} kills, {life.committed} of them behind the commit, {len(life.folder.model.steps)} steps"
        print(f"\n{said}", flush=True)
    life.folder.close()
