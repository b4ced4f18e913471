"""The rule `ode`: in a stream, with its presets, and in a trunk that may be killed at any moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from shared import committed, listing

import mergeway as mw
from mergeway.errors import MergewayError, OptionError
from mergeway.fold.merge import fold_steps
from mergeway.rules import Ode


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return mw.load_suite(tiny.vision_suite(tmp_path_factory.mktemp("suite")))


def experts(suite) -> list[Path]:
    return [task.expert for task in suite.tasks]


def assert_same(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


# --- in a stream ------------------------------------------------------------------------------------------------------


def test_equals_average_while_nothing_is_damped(stream):
    """A loss that falls toward every arrival: γ ≡ 1, the path is straight, and t_k = w_k/W_k is the weighted mean."""
    s = stream(4)
    direction = {n: torch.randn(t.shape) for n, t in s.base_tensors.items() if t.is_floating_point()}
    # Every arrival is further along a common direction than the mean of those before it.
    arrivals = [
        {n: t + 0.1 * (k + 1) * direction[n] if n in direction else t for n, t in tuned.items()}
        for k, tuned in enumerate(s.arrival_tensors)
    ]

    def loss(params):
        return -sum((params[n] * d).sum() for n, d in direction.items())

    weights = [1.0, 2.0, 0.5, 3.0]
    steps = list(fold_steps(s.base_tensors, arrivals, "ode", weights, loss))
    assert [step.at.facts["gamma"] for step in steps[1:]] == [1.0] * 3
    average = mw.merge(s.base_tensors, arrivals, "average", weights)
    for name in direction:
        assert torch.allclose(steps[-1].params[name], average[name], atol=2e-6, rtol=0)


def test_differs_from_average_where_it_damps(suite):
    objective = suite.objective([t.name for t in suite.tasks])
    steps = list(fold_steps(suite.base, experts(suite), "ode", None, objective))
    assert min(step.at.facts.get("gamma", 1.0) for step in steps) < 1
    average = mw.merge(suite.base, experts(suite), "average")
    assert any(not torch.allclose(steps[-1].params[n], average[n], atol=1e-5) for n in average)


def test_a_stream_is_trajectories_end_to_end(suite):
    """Ψ_1 = ψ_1, then each fold walks from the model before to the arrival until w_k/W_k, on the tasks seen so far."""
    names, weights = [t.name for t in suite.tasks], [1.0, 2.0, 1.5]
    objective = suite.objective(names, size=30)
    arrivals = [load_file(e / "model.safetensors") for e in experts(suite)]
    model = arrivals[0]
    for k in (2, 3):
        seen = suite.objective(names[:k], weights[:k], size=30)
        model = mw.trajectory(model, arrivals[k - 1], seen, weights[k - 1] / sum(weights[:k])).end
    merged = mw.merge(suite.base, arrivals, "ode", weights, objective)
    for name, tensor in model.items():
        assert torch.allclose(merged[name], tensor, atol=1e-6), name


def test_facts_and_details(suite):
    objective = suite.objective([t.name for t in suite.tasks])
    *_, last = fold_steps(suite.base, experts(suite), "ode", None, objective)
    told = last.details["trajectory"]
    assert last.at.facts["time"] == pytest.approx(1 / 3)
    assert last.at.facts["gradients"] == told["evaluations"] == 7
    assert last.at.facts["barrier"] == told["barrier"]
    assert {"bound", "rho", "distance_bound", "certified", "losses", "gammas", "alignments"} <= set(told)
    json.dumps(last.details)


@pytest.mark.parametrize("time", [0.0, 0.3, 1.0])
def test_a_fixed_time(suite, time):
    objective = suite.objective(["ants", "bees"])
    pair = [load_file(e / "model.safetensors") for e in experts(suite)[:2]]
    merged = mw.merge(suite.base, pair, "ode", None, objective, time=time, barrier="none")
    for name in pair[0]:
        expected = (
            torch.lerp(pair[0][name].float(), pair[1][name].float(), time)
            if pair[0][name].is_floating_point()
            else pair[0][name]
        )
        assert torch.allclose(merged[name], expected, atol=1e-6)


def test_an_arrival_equal_to_the_deployed_model_changes_nothing(suite):
    expert = load_file(experts(suite)[0] / "model.safetensors")
    merged = mw.merge(suite.base, [expert, expert], "ode", None, suite.objective(["ants", "bees"]))
    assert_same(merged, expert)


def test_half_precision(suite):
    """Walked in float32, rounded once at the end; the inputs stay in their own precision."""
    base, *arrivals = (
        {n: t.bfloat16() if t.is_floating_point() else t for n, t in load_file(p / "model.safetensors").items()}
        for p in (suite.base, *experts(suite)[:2])
    )
    merged = mw.merge(base, arrivals, "ode", None, suite.objective(["ants", "bees"]))
    wide = [{n: t.float() if t.is_floating_point() else t for n, t in m.items()} for m in (base, *arrivals)]
    exact = mw.merge(wide[0], wide[1:], "ode", None, suite.objective(["ants", "bees"]))
    for name, tensor in exact.items():
        assert merged[name].dtype == base[name].dtype
        assert torch.equal(merged[name], tensor.to(base[name].dtype))


def test_needs_an_objective(stream, call, tmp_path):
    s = stream(2)
    with pytest.raises(OptionError, match="rule 'ode' needs calibration data"):
        mw.merge(s.base, s.arrivals, "ode")
    line = call("merge", s.base, *s.arrivals, "--rule", "ode", "--out", tmp_path / "out").mistake()
    assert "rule 'ode' needs calibration data" in line and "--suite or --objective" in line
    assert not (tmp_path / "out").exists()


def test_an_objective_for_fewer_tasks_than_arrivals(suite):
    with pytest.raises(OptionError, match="samples of 2 tasks, but 3 arrivals"):
        mw.merge(suite.base, experts(suite), "ode", None, suite.objective(["ants", "bees"]))


# --- options ----------------------------------------------------------------------------------------------------------


def test_a_preset_fills_in_what_was_left_alone():
    assert Ode().chosen() == Ode()
    released = Ode(preset="released").chosen()
    assert (released.step, released.guidance, released.task_norm) == (0.01, 0.24, 0.25)
    assert (released.barrier, released.refine, released.refine_by) == ("released", 80, "released")
    own = Ode(preset="released", step=0.02, refine=3, barrier="none").chosen()
    assert (own.step, own.guidance, own.refine, own.barrier) == (0.02, 0.24, 3, "none")


def test_a_preset_is_the_options_it_names(suite):
    objective = suite.objective(["ants", "bees"])
    preset = mw.merge(suite.base, experts(suite)[:2], "ode", None, objective, preset="exact", step=0.1, refine=3)
    spelled = mw.merge(
        suite.base,
        experts(suite)[:2],
        "ode",
        None,
        objective,
        step=0.1,
        guidance=0.24,
        task_norm=0.25,
        barrier="per-task",
        refine=3,
    )
    assert_same(preset, spelled)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"solver": "eular"}, "euler"),
        ({"step": 0}, "positive and at most 1"),
        ({"step": "nan"}, "finite number"),
        ({"guidance": -1}, "at least 0"),
        ({"task_norm": -1}, "at least 0"),
        ({"time": 1.5}, "at most 1"),
        ({"refine": -1}, "at least 0"),
        ({"refine": 1.5}, "whole number"),
        ({"metric": "euclid"}, "euclidean or layer or diagonal"),
        ({"barrier": "high"}, "none or path or per-task"),
        ({"preset": "published"}, "paper or exact or released"),
        ({"solver": "heun", "certify": True}, "certify needs the solver"),
        ({"barrier": "per-task", "solver": "rk4"}, "per-task goes with solver=euler"),
        ({"preset": "exact", "certify": "true"}, "per-task goes with"),
        ({"stepsize": 0.1}, "did you mean 'step'"),
    ],
)
def test_options_are_checked_when_the_rule_is_made(options, said):
    with pytest.raises(OptionError, match=said):
        mw.rules.make("ode", options)


# --- objectives from the command line ---------------------------------------------------------------------------------

LOSSES = """
import torch
calls = 0

def good(params):
    return sum(p.square().sum() for p in params.values() if p.is_floating_point())

def nan(params):
    return good(params) * float("nan")

def later(params):
    global calls
    calls += 1
    return good(params) * (float("nan") if calls > 4 else 1.0)

def vector(params):
    return next(iter(params.values()))

def number(params):
    return 1.0

def fails(params):
    return params["no such tensor"]

constant = 3
"""


@pytest.fixture
def losses(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(LOSSES)
    (tmp_path / "my_broken.py").write_text("import torch\nthis is no python\n")
    (tmp_path / "my_failing.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("my_losses", "my_broken", "my_failing"):
        sys.modules.pop(name, None)


def test_an_objective_of_the_users_own(stream, call, losses, tmp_path):
    s = stream(3)
    words = ("merge", s.base, *s.arrivals, "--rule", "ode", "--set", "step=0.25", "--objective", "my_losses:good")
    done = call(*words, "--out", tmp_path / "out", "--json").json()
    assert done["facts"]["gradients"] == 2
    import my_losses

    expected = mw.merge(s.base, s.arrivals, "ode", None, my_losses.good, step=0.25)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), expected)


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("my_losses", "expected module:function"),
        ("my_losses:", "expected module:function"),
        ("no_such_module:f", "the module cannot be imported"),
        ("my_broken:f", "importing the module failed (SyntaxError"),
        ("my_failing:f", "importing the module failed (RuntimeError: not today)"),
        ("my_losses:goood", "module 'my_losses' has no 'goood'"),
        ("my_losses:constant", "is not a function"),
        ("my_losses:vector", "the objective returned a tensor of shape"),
        ("my_losses:number", "the objective returned float; it must return one number as a tensor"),
        ("my_losses:nan", "the objective is nan"),
        ("my_losses:later", "the objective is nan at t = 0.1"),
        ("my_losses:fails", "my_losses:fails failed (KeyError: 'no such tensor')"),
    ],
)
def test_objectives_that_do_not_work(stream, call, losses, tmp_path, objective, said):
    s = stream(2)
    words = ("merge", s.base, *s.arrivals, "--rule", "ode", "--objective", objective, "--out", tmp_path / "out")
    assert said in call(*words).mistake()
    assert not (tmp_path / "out").exists()


def test_a_suite_knows_its_experts(suite, stream, call, tmp_path):
    s = stream(1)
    out = ("--rule", "ode", "--out", tmp_path / "out")
    said = call("merge", suite.base, s.arrivals[0], *out, "--suite", suite.path).mistake()
    assert "is not an expert of suite 'tiny'" in said
    said = call("merge", suite.base, *experts(suite), *out, "--suite", suite.path, "--objective", "a:b").mistake()
    assert "give one of them" in said


# --- in a trunk -------------------------------------------------------------------------------------------------------


def grow(path: Path, suite, count: int = 3, weights=(1.0, 2.0, 1.5), **options) -> mw.Trunk:
    trunk = mw.Trunk.create(path, suite.base, "ode", **options)
    for task, weight in zip(suite.tasks[:count], weights, strict=False):
        trunk.add(task.expert, task.name, weight, data=str(suite.path))
    return trunk


def test_a_trunk_is_the_bits_of_merge(suite, tmp_path):
    trunk = grow(tmp_path / "trunk", suite)
    merged = mw.merge(
        suite.base, experts(suite), "ode", [1.0, 2.0, 1.5], suite.objective([t.name for t in suite.tasks])
    )
    assert_same(trunk.params(), merged)
    assert trunk.verify() == []


def test_data_and_head_are_those_of_the_suite(suite, call, tmp_path):
    """The same samples by --data and --head as by SUITE#TASK, but for the settings that the files carry themselves."""
    base = tmp_path / "base"
    shutil.copytree(suite.base, base)
    (base / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    for name in ("one", "two"):
        call("init", tmp_path / name, "--base", base, "--rule", "ode").ok()
    for task in suite.tasks:
        head = tmp_path / "head.safetensors"
        save_file(load_file(task.head) | {"logit_scale": torch.tensor(tiny.SCALE)}, head)
        call("add", tmp_path / "one", task.expert, "--data", task.data, "--head", head).ok()
        call("add", tmp_path / "two", task.expert, "--data", f"{suite.path}#{task.name}").ok()
    one, two = (mw.Trunk.open(tmp_path / name) for name in ("one", "two"))
    assert one.log()[-1].result == two.log()[-1].result


def test_show_tells_the_certificate(suite, call, tmp_path):
    grow(tmp_path / "trunk", suite, 2)
    record = call("show", tmp_path / "trunk", "--json").json()
    told = json.dumps(record)
    assert '"trajectory"' in told
    assert '"certified"' in told
    shown = call("show", tmp_path / "trunk").ok().out
    for word in ("gradients", "barrier", "bound", "gamma"):
        assert word in shown


def test_verify_covers_the_samples(suite, tmp_path):
    trunk = grow(tmp_path / "trunk", suite, 2)
    snapshot = tmp_path / "trunk" / "steps" / "000002"
    for name, said in (
        ("calibration-heads.safetensors", "tensor '"),
        ("calibration.parquet", "calibration.parquet: was changed"),
        ("calibration.json", "calibration.json: was changed"),
    ):
        file = snapshot / name
        before = file.read_bytes()
        file.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
        problems = trunk.verify()
        assert len(problems) == 1
        assert name in problems[0]
        assert said in problems[0]
        file.write_bytes(before)
        file.unlink()
        assert any(f"{name}: is missing" in problem for problem in trunk.verify())
        file.write_bytes(before)
    assert trunk.verify() == []


def test_rollback_restores_the_samples(suite, tmp_path):
    trunk = grow(tmp_path / "trunk", suite, 3)
    expected = trunk.log()[-1]
    trunk.rollback(2)
    described = json.loads((tmp_path / "trunk" / "steps" / "000004" / "calibration.json").read_text())
    assert [row["name"] for row in described["tasks"]] == ["ants", "bees"]
    task = suite.tasks[2]
    again = trunk.add(task.expert, task.name, 1.5, data=str(suite.path))
    assert again.result == expected.result
    assert again.files == expected.files
    assert trunk.verify() == []


def test_refinement_is_part_of_its_fold(suite, tmp_path):
    """The refined model is deployed after every fold; the stream continues from the fold itself."""
    trunk = grow(tmp_path / "trunk", suite, 3, refine=2, keep=9)
    assert [(r.kind, r.task) for r in trunk.log()[1:]] == [("add", t.name) for t in suite.tasks]
    plain = grow(tmp_path / "plain", suite, 3)
    for refined, raw in zip(trunk.log()[1:], plain.log()[1:], strict=True):
        assert refined.result != raw.result
        assert len(refined.details["refine"]["losses"]) == 3
    states = [load_file(path / "steps" / "000003" / "state.safetensors") for path in (trunk.path, plain.path)]
    assert_same(*states)
    order = [t.name for t in suite.tasks]
    steps = fold_steps(suite.base, experts(suite), Ode(refine=2), [1.0, 2.0, 1.5], suite.objective(order))
    for step, record in zip(steps, trunk.log()[1:], strict=True):
        assert_same(step.params, {n: trunk.deployed(record.step).read(n) for n in step.params})
    merged = mw.merge(
        suite.base, experts(suite), "ode", [1.0, 2.0, 1.5], suite.objective([t.name for t in suite.tasks]), refine=2
    )
    assert_same(trunk.params(), merged)
    assert [f.task for f in trunk.folded()] == [t.name for t in suite.tasks]
    assert trunk.verify() == []


def test_the_memory_does_not_grow(suite, tmp_path):
    """However many arrivals: at most so many samples in all, and the rest of the snapshot as large as ever."""
    trunk = grow(tmp_path / "trunk", suite, 1, keep=1)
    sizes = []
    for k in range(2, 6):
        trunk.add(experts(suite)[k % 3], f"task{k}", data=f"{suite.path}#bees", again=True)
        files = {p.name: p.stat().st_size for p in (tmp_path / "trunk" / "steps" / f"{k:06d}").iterdir()}
        sizes.append(files["state.safetensors"] + files["model.safetensors"])
        samples = parquet.read_table(tmp_path / "trunk" / "steps" / f"{k:06d}" / "calibration.parquet")
        assert 0 < len(samples) <= 1024
    assert len(set(sizes)) == 1


def test_an_objective_instead_of_data(suite, tmp_path):
    trunk = mw.Trunk.create(tmp_path / "trunk", suite.base, "ode")
    objective = suite.objective([t.name for t in suite.tasks])
    for task in suite.tasks:
        trunk.add(task.expert, task.name, objective=objective)
    assert_same(trunk.params(), mw.merge(suite.base, experts(suite), "ode", None, objective))
    with pytest.raises(OptionError, match=r"remembers no samples of ants, bees, cats.*data={'ants': DATA}"):
        trunk.add(experts(suite)[0], "more", data=f"{suite.path}#ants", again=True)


def test_a_data_free_rule_takes_no_data(suite, call, tmp_path):
    call("init", tmp_path / "trunk", "--base", suite.base, "--rule", "average").ok()
    said = call("add", tmp_path / "trunk", experts(suite)[0], "--data", f"{suite.path}#ants").mistake()
    assert "rule 'average' uses no data" in said


def test_more_tasks_than_samples(suite, call, tmp_path):
    said = call("bench", suite.path, "--rules", "ode", "--orders", 1, "--samples", 2).mistake()
    assert "2 calibration samples for 3 tasks: each task needs at least one" in said


def test_a_loss_that_breaks_leaves_the_trunk(suite, tmp_path):
    trunk = grow(tmp_path / "trunk", suite, 1)
    before = committed(tmp_path / "trunk")
    with pytest.raises(MergewayError, match="the objective is nan"):
        trunk.add(experts(suite)[1], "bees", objective=lambda p: sum(t.sum() for t in p.values()) * float("nan"))
    assert committed(tmp_path / "trunk") == before
    assert trunk.verify() == []
    trunk.add(experts(suite)[1], "bees", 2.0, data=str(suite.path))


# Imports once, then forks a writer for each line of stdin; the writer tells of every gradient and takes its time.
WRITER = """
import json, os, sys, time, torch
torch.set_num_threads(1)
import mergeway as mw, mergeway.rules.ode.flat as flat, transformers
from transformers import CLIPVisionModelWithProjection
from mergeway.trunk import Trunk
plain = flat.FlatParams.gradient
def slow(self, loss):
    value = plain(self, loss)
    print(os.getpid(), flush=True)
    time.sleep(0.2)
    return value
flat.FlatParams.gradient = slow
for line in sys.stdin:
    trunk, arrival, suite = json.loads(line)
    if os.fork() == 0:
        Trunk.open(trunk).add(arrival, "cats", 1.5, data=suite)
        os._exit(0)
    print(os.WTERMSIG(os.wait()[1]), flush=True)
"""


def test_killed_during_an_add(suite, tmp_path):
    """SIGKILL in the middle of the trajectory: the last commit stands, and repeating the fold gives the same bits."""
    start, whole = tmp_path / "start", tmp_path / "whole"
    grow(start, suite, 2)
    before = committed(start)
    shutil.copytree(start, whole)
    arrival = suite.tasks[2].expert
    expected = mw.Trunk.open(whole).add(arrival, "cats", 1.5, data=str(suite.path))
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    for gradients in (1, 5):
        trunk = tmp_path / f"killed-{gradients}"
        shutil.copytree(start, trunk)
        writer.stdin.write(json.dumps([str(trunk), str(arrival), str(suite.path)]) + "\n")
        for _ in range(gradients):
            child = int(writer.stdout.readline())
        os.kill(child, signal.SIGKILL)
        assert int(writer.stdout.readline()) == signal.SIGKILL
        opened = mw.Trunk.open(trunk)
        assert opened.verify() == []
        assert committed(trunk) == before
        record = opened.add(arrival, "cats", 1.5, data=str(suite.path))
        assert (record.result, record.files) == (expected.result, expected.files)
        assert opened.verify() == []
    writer.stdin.close()
    writer.stdout.close()
    assert writer.wait(timeout=60) == 0


def test_inputs_stay(suite, tmp_path):
    before = listing(suite.path)
    grow(tmp_path / "trunk", suite, 3)
    mw.merge(suite.base, experts(suite), "ode", None, suite.objective([t.name for t in suite.tasks]))
    assert listing(suite.path) == before
    arrivals = [load_file(e / "model.safetensors") for e in experts(suite)]
    copies = [{n: t.clone() for n, t in a.items()} for a in arrivals]
    mw.merge(suite.base, arrivals, "ode", None, suite.objective([t.name for t in suite.tasks]))
    for ours, theirs in zip(arrivals, copies, strict=True):
        assert_same(ours, theirs)
