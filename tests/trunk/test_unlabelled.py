"""A trunk without labels: the arrivals answer for their samples, and stopping, killing and resuming change no bit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import mergeway as mw
from mergeway.calibration.function_objective import FunctionObjective
from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.calibration.sample_objective import SampleObjective
from mergeway.calibration.task_data import task_data
from mergeway.fold.merge import fold_steps
from mergeway.rules import make

# Few steps, so that a fold takes a moment; a memory that shrinks with every task.
# At a higher temperature these random models learn too little in three steps for the samples to tell.
QUICK = {"steer": {"steps": 3, "most": 8, "batch": 12, "temperature": 1.0}, "ode": {"step": 0.2, "guidance": 0.5}}
BOUNDS = Bounds(24, copies=2)


@pytest.fixture(scope="module")
def bare(vision, text, tmp_path_factory):
    """Data and heads of both suites' tasks as files, without a label: {task: (data, head)}."""
    folder = tmp_path_factory.mktemp("bare")
    found = {}
    for suite in (vision, text):
        for task in suite.tasks:
            head = folder / f"{task.name}.safetensors"
            save_file({**load_file(task.head), "logit_scale": torch.tensor(tiny.SCALE)}, head)
            if suite is vision:
                data = folder / f"{task.name}.npz"
                with np.load(task.data) as file:
                    np.savez(data, x=file["x_train"])
            else:
                data = folder / f"{task.name}.jsonl"
                lines = Path(f"{task.data}.train.jsonl").read_text().splitlines()
                data.write_text("".join(json.dumps({"text": json.loads(line)["text"]}) + "\n" for line in lines))
            found[task.name] = (data, head)
    return found


def start(path: Path, suite, rule: str, bounds: Bounds = BOUNDS, **options) -> mw.Trunk:
    return mw.Trunk.create(path, suite.base, make(rule, QUICK.get(rule, {}) | options), memory=bounds)


def objective_of(suite, bare, bounds: Bounds = BOUNDS) -> mw.Objective:
    """The loss that the trunk builds, over all tasks at once."""
    read, model = [], suite.base
    for task in suite.tasks:
        data, head = bare[task.name]
        model, samples = task_data(str(data), head, task.name, model)
        read.append(samples)
    return mw.Objective(model, read, size=bounds.size, seed=bounds.seed, copies=bounds.copies)


def words(bare, task, *more):
    data, head = bare[task.name]
    return [task.expert, "--task", task.name, "--data", data, "--head", head, *more]


def same(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], t) for n, t in theirs.items())


# --- folding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vision", "text"])
@pytest.mark.parametrize("rule", ["steer", "ode"])
def test_resumed_is_uninterrupted(kind, rule, bare, tmp_path, request):
    """A trunk that is opened anew for every fold against one stream over the same samples, bit for bit."""
    suite = request.getfixturevalue(kind)
    weights = [1.0, 2.0, 0.5][: len(suite.tasks)]
    start(tmp_path / "trunk", suite, rule)
    experts = [t.expert for t in suite.tasks]
    steps = fold_steps(suite.base, experts, make(rule, QUICK[rule]), weights, objective_of(suite, bare))
    straight = None
    for task, weight, step in zip(suite.tasks, weights, steps, strict=True):
        data, head = bare[task.name]
        trunk = mw.Trunk.open(tmp_path / "trunk")
        record = trunk.add(task.expert, task.name, weight, data=data, head=head)
        assert same({n: trunk.params()[n] for n in step.params}, step.params)
        assert record.details["facts"] == dict(step.at.facts)
        straight = step.params
    mean = mw.merge(suite.base, experts, "average", weights)
    assert not same(mean, straight)
    assert trunk.verify() == []
    # What the memory has of each task: its share of samples, each with its copies, and no label.
    rows = trunk.memory()["tasks"]
    counts = BOUNDS.counts(len(rows), None)
    assert [(r["samples"], r["copies"], r["answers"]) for r in rows] == [(n, 2, 3 * n) for n in counts]
    held = CalibrationMemory.read(tmp_path / "trunk" / "steps" / f"{len(rows):06d}")
    assert not any(t.labelled for t in held.tasks)


@pytest.mark.parametrize("rule", ["steer", "ode"])
def test_a_stream_that_goes_on_asks_the_earlier_arrivals_again(rule, vision, bare):
    experts = [t.expert for t in vision.tasks]
    chosen, objective = make(rule, QUICK[rule]), objective_of(vision, bare)
    steps = list(fold_steps(vision.base, experts, chosen, None, objective))
    for k in (1, 2):
        after = (steps[k - 1].at, steps[k - 1].state)
        rest = list(fold_steps(vision.base, experts, chosen, None, objective, after=after))
        assert len(rest) == 3 - k
        assert same(rest[-1].params, steps[-1].params)


def test_a_folder_of_images_alone(vision, bare, tmp_path):
    """The same pictures from a folder give the same model as from an array."""
    task = vision.tasks[0]
    with np.load(bare[task.name][0]) as file:
        (tmp_path / "images").mkdir()
        for k, image in enumerate(file["x"]):
            Image.fromarray(image).save(tmp_path / "images" / f"{k:03d}.png")
    results = []
    for name, data in (("one", bare[task.name][0]), ("two", tmp_path / "images")):
        trunk = start(tmp_path / name, vision, "steer")
        trunk.add(task.expert, task.name, data=data, head=bare[task.name][1])
        held = CalibrationMemory.read(tmp_path / name / "steps" / "000001")
        results.append((trunk.log()[-1].result, held.tasks[0].answers))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def test_labels_change_nothing_that_steer_does(vision, bare, tmp_path):
    """It asks in any case."""
    ends = []
    for labels in (True, False):
        trunk = start(tmp_path / str(labels), vision, "steer")
        for task in vision.tasks[:2]:
            data, head = bare[task.name]
            trunk.add(task.expert, task.name, data=task.data if labels else data, head=head)
        ends.append(trunk.params())
    assert same(*ends)


def test_regmean_needs_no_labels(vision, bare, tmp_path):
    trunk = start(tmp_path / "trunk", vision, "regmean")
    for task in vision.tasks[:2]:
        trunk.add(task.expert, task.name, data=bare[task.name][0], head=bare[task.name][1])
    assert trunk.verify() == []


# --- killed -----------------------------------------------------------------------------------------------------------

# Adds an arrival and is killed on the way: in the middle of the steps, or when the memory has just been written.
KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import mergeway as mw
from mergeway.calibration.sample_objective import SampleObjective
from mergeway.trunk.commit import Commit
moment, trunk, expert, task, data, head = sys.argv[1:]
steps, write = SampleObjective.accumulate_batch, Commit.keep_memory
count = 0

def accumulate_batch(self, params, batch):
    global count
    count += 1
    if moment == "steps" and count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return steps(self, params, batch)

def keep_memory(self, memory):
    write(self, memory)
    if moment == "memory":
        os.kill(os.getpid(), signal.SIGKILL)

SampleObjective.accumulate_batch, Commit.keep_memory = accumulate_batch, keep_memory
mw.Trunk.open(trunk, threads=1).add(expert, task, data=data, head=head)
"""


def test_killed_and_repeated_gives_the_same_bits(vision, bare, tmp_path):
    first, second = vision.tasks[:2]
    trunks = {name: start(tmp_path / name, vision, "steer") for name in ("whole", "killed")}
    for trunk in trunks.values():
        trunk.add(first.expert, first.name, data=bare[first.name][0], head=bare[first.name][1])
    expected = trunks["whole"].add(second.expert, second.name, data=bare[second.name][0], head=bare[second.name][1])
    killed = trunks["killed"]
    before = killed.log()
    for moment in ("steps", "memory"):
        line = [moment, killed.path, second.expert, second.name, *bare[second.name]]
        done = subprocess.run([sys.executable, "-c", KILLED, *map(str, line)], capture_output=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
        assert killed.log() == before and killed.verify() == []
    again = killed.add(second.expert, second.name, data=bare[second.name][0], head=bare[second.name][1])
    assert (again.result, again.files) == (expected.result, expected.files)
    assert killed.memory() == trunks["whole"].memory()
    # And so does what follows.
    third = vision.tasks[2]
    ends = [
        t.add(third.expert, third.name, data=bare[third.name][0], head=bare[third.name][1]) for t in trunks.values()
    ]
    assert ends[0].result == ends[1].result and ends[0].files == ends[1].files


def test_folding_again_after_a_rollback_gives_the_same_bits(vision, bare, tmp_path):
    trunk = start(tmp_path / "trunk", vision, "steer")
    results = []
    for task in vision.tasks[:2]:
        results.append(trunk.add(task.expert, task.name, data=bare[task.name][0], head=bare[task.name][1]))
    trunk.rollback(1)
    again = trunk.add(vision.tasks[1].expert, "bees", data=bare["bees"][0], head=bare["bees"][1])
    assert (again.result, again.files) == (results[1].result, results[1].files)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_copies_of_a_trunk_and_of_an_arrival(vision, bare, tmp_path, call):
    trunk = tmp_path / "trunk"
    sets = [word for k, v in QUICK["steer"].items() for word in ("--set", f"{k}={v}")]
    call("init", trunk, "--base", vision.base, "--rule", "steer", *sets, "--memory", 24, "--copies", 3).ok()
    ants, bees, cats = vision.tasks
    call("add", trunk, *words(bare, ants)).ok()
    call("add", trunk, *words(bare, bees, "--copies", 1)).ok()
    call("add", trunk, *words(bare, cats, "--copies", 0)).ok()
    held = call("memory", trunk, "--json").json()
    assert held["copies"] == 3
    assert [(r["task"], r["samples"], r["copies"], r["answers"]) for r in held["tasks"]] == [
        ("ants", 8, 3, 32),
        ("bees", 8, 1, 16),
        ("cats", 8, 0, 8),
    ]
    shown = call("memory", trunk).ok().out
    assert [line.split() for line in shown.splitlines()[:4]] == [
        ["task", "samples", "copies", "answers"],
        ["ants", "8", "3", "32"],
        ["bees", "8", "1", "16"],
        ["cats", "8", "0", "8"],
    ]
    assert f"{held['bytes']} bytes" in shown
    assert held["bytes"] == sum(p.stat().st_size for p in (trunk / "steps" / "000003").glob("calibration*"))
    assert json.loads((trunk / "trunk.json").read_text())["memory"]["copies"] == 3


def test_by_default_a_small_memory_has_many_copies(vision, bare, tmp_path):
    trunk = start(tmp_path / "trunk", vision, "steer", Bounds(1000))
    trunk.add(vision.tasks[0].expert, "ants", data=bare["ants"][0], head=bare["ants"][1])
    assert trunk.memory()["tasks"][0]["copies"] == 7
    assert trunk.memory()["copies"] is None


# --- falling back -----------------------------------------------------------------------------------------------------


def notes_of(call, trunk, added) -> list[str]:
    """What `add`, `log` and `show` say of a fold that was not taught as it should be."""
    outs = (added, call("log", trunk).ok().out, call("show", trunk).ok().out)
    return [
        line
        for out in outs
        for line in out.splitlines()
        if "fell back" in line or "not taught" in line or "lesson" in line
    ]


def judged_by(monkeypatch, judge):
    split = SampleObjective.split
    monkeypatch.setattr(SampleObjective, "split", lambda self: (split(self)[0], FunctionObjective(judge)))


def test_a_fold_that_fell_back_says_so(vision, bare, tmp_path, call, monkeypatch):
    """Held-back samples that like every model less than the one before."""
    looks = iter(range(1, 100))
    judged_by(monkeypatch, lambda params: torch.tensor(0.5 * next(looks)))
    trunk = start(tmp_path / "trunk", vision, "steer").path
    ants, bees, _ = vision.tasks
    assert not notes_of(call, trunk, call("add", trunk, *words(bare, ants)).ok().out)
    added = call("add", trunk, *words(bare, bees)).ok().out
    facts = call("show", trunk, "--json").json()["details"]["facts"]
    assert facts["fell_back"] == 1.0 and (facts["held_plain"], facts["held_end"]) == (0.5, 1.0)
    plain = "the flat sum (iso, scaling=auto)" if facts["plain_flat"] else "the mean"
    found = notes_of(call, trunk, added)
    assert len(found) == 3
    wanted = f"fell back to {plain} of the updates, as the taught model is not better: on held-back samples its loss is 1, and"
    assert all(wanted in line for line in found)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.0], "not taught: held-back samples got worse with every part of the lesson"),
        ([5.0, 4.0, 1.0, 2.0, 3.0], "0.25 of the lesson is kept: held-back samples liked that best"),
    ],
)
def test_a_fold_that_was_not_taught_says_so(vision, bare, tmp_path, call, monkeypatch, said, wanted):
    """Held-back samples that like the plain merge least, and the start or a quarter of the lesson most."""
    values = iter([9.0, *said, *said, *said])  # the plain merge, then each of three lessons
    judged_by(monkeypatch, lambda params: torch.tensor(next(values)))
    trunk = start(tmp_path / "trunk", vision, "steer").path
    ants, bees, _ = vision.tasks
    call("add", trunk, *words(bare, ants)).ok()
    found = notes_of(call, trunk, call("add", trunk, *words(bare, bees)).ok().out)
    assert len(found) == 3 and all(wanted in note for note in found)


def test_a_fold_with_too_few_samples_to_teach_says_so(vision, bare, tmp_path, call):
    trunk = start(tmp_path / "trunk", vision, "steer", Bounds(15, copies=2)).path
    ants, bees, _ = vision.tasks
    call("add", trunk, *words(bare, ants)).ok()
    found = notes_of(call, trunk, call("add", trunk, *words(bare, bees)).ok().out)
    wanted = "not taught: a task has only 7 samples, too few to teach and to judge by; deployed is the "
    assert len(found) == 3 and all(wanted in note for note in found)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_rule_that_needs_labels(vision, bare, tmp_path, call):
    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", vision.base, "--rule", "fisher").ok()
    said = call("add", trunk, *words(bare, vision.tasks[0])).mistake()
    assert "the samples of 'ants' have no labels, and an empirical Fisher needs them" in said
    assert len(mw.Trunk.open(trunk).log()) == 1


@pytest.mark.parametrize("rule", ["steer", "ode"])
def test_without_memory_there_are_no_answers_later(rule, vision, bare, tmp_path, call):
    start(tmp_path / "trunk", vision, rule)
    ants, bees, _ = vision.tasks
    call("add", tmp_path / "trunk", *words(bare, ants, "--no-memory")).ok()
    both = []
    for task in (ants, bees):
        data, head = bare[task.name]
        both += ["--data", f"{task.name}={data}", "--head", f"{task.name}={head}"]
    said = call("add", tmp_path / "trunk", bees.expert, "--task", "bees", *both).mistake()
    assert "the samples of 'ants' have no labels, and the trunk kept none of its answers; give labelled data" in said
    both[1] = f"ants={ants.data}"
    call("add", tmp_path / "trunk", bees.expert, "--task", "bees", *both).ok()


@pytest.mark.parametrize("copies", [-1, -20])
def test_copies_that_are_no_number(copies, vision, bare, tmp_path, call):
    trunk = tmp_path / "trunk"
    said = f"--copies is {copies}; it must be 0 or more"
    assert said in call("init", trunk, "--base", vision.base, "--rule", "steer", "--copies", copies).mistake()
    assert not trunk.exists()
    call("init", trunk, "--base", vision.base, "--rule", "steer").ok()
    assert said in call("add", trunk, *words(bare, vision.tasks[0], "--copies", copies)).mistake()


def test_copies_where_nobody_is_asked(vision, bare, tmp_path, call):
    trunk = tmp_path / "trunk"
    call("init", trunk, "--base", vision.base, "--rule", "average").ok()
    said = call("add", trunk, vision.tasks[0].expert, "--copies", 3).mistake()
    assert "--copies: no arrival is asked here" in said


def test_a_head_that_was_replaced(vision, bare, tmp_path, call):
    """The answers of a task are for the classes of the head it came with; the digests see the other one first."""
    trunk = start(tmp_path / "trunk", vision, "steer")
    ants, bees, _ = vision.tasks
    trunk.add(ants.expert, "ants", data=bare["ants"][0], head=bare["ants"][1])
    stored = tmp_path / "trunk" / "steps" / "000001" / "calibration-heads.safetensors"
    save_file({"0": torch.eye(5, tiny.WIDTH)}, stored)
    said = call("add", trunk.path, *words(bare, bees)).mistake()
    assert "calibration-heads.safetensors" in said and "was changed after step 1 was committed" in said
    assert trunk.verify() != []


def test_test_data_needs_labels(vision, tmp_path, call):
    shutil.copytree(vision.path, tmp_path / "suite")
    with np.load(tmp_path / "suite" / "data" / "ants.npz") as file:
        arrays = {k: v for k, v in file.items() if k != "y_test"}
    np.savez(tmp_path / "suite" / "data" / "ants.npz", **arrays)
    said = call("evaluate", vision.base, "--suite", tmp_path / "suite").mistake()
    assert "the samples of 'ants' have no labels, and a model is judged by those of its test data" in said
