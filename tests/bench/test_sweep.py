"""`evaluate` and `path`: one model on a suite, one trajectory between two of its experts."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from safetensors.torch import load_file, save_file

import mergeway as mw


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return mw.load_suite(tiny.vision_suite(tmp_path_factory.mktemp("suite")))


def test_evaluate_a_checkpoint_and_a_trunk(suite, call, tmp_path):
    expert = suite.task("bees").expert
    told = call("evaluate", expert, "--suite", suite.path, "--json").json()
    params = load_file(expert / "model.safetensors")
    assert told["tasks"] == {t.name: suite.accuracy(params, t.name) for t in suite.tasks}
    assert told["acc"] == pytest.approx(np.mean(list(told["tasks"].values())))
    trunk = mw.Trunk.create(tmp_path / "trunk", suite.base, "average")
    trunk.add(expert)
    trunk.add(suite.task("cats").expert)
    told = call("evaluate", tmp_path / "trunk", "--suite", suite.path, "--json").json()
    assert told["tasks"] == {t.name: suite.accuracy(trunk.params(), t.name) for t in suite.tasks}
    shown = call("evaluate", tmp_path / "trunk", "--suite", suite.path).ok().out
    assert f"{told['acc']:.1f}" in shown.splitlines()[-1]


def test_evaluate_half_precision(suite, call, tmp_path):
    params = load_file(suite.task("bees").expert / "model.safetensors")
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in params.items()}
    save_file(half, tmp_path / "half.safetensors")
    told = call("evaluate", tmp_path / "half.safetensors", "--suite", suite.path, "--json").json()
    wide = {n: t.float() if t.is_floating_point() else t for n, t in half.items()}
    assert told["tasks"] == {t.name: suite.accuracy(wide, t.name) for t in suite.tasks}


def test_evaluate_something_else(suite, call, stream, tmp_path):
    assert "tensor" in call("evaluate", stream(1).base, "--suite", suite.path).mistake()
    assert "no such file" in call("evaluate", tmp_path / "nowhere", "--suite", suite.path).mistake()


@pytest.mark.parametrize("options", [{}, {"solver": "heun"}, {"guidance": 0.3, "metric": "layer"}])
def test_path_is_a_trajectory_seen_at_its_times(suite, call, options):
    a, b = suite.task("ants"), suite.task("bees")
    words = [w for k, v in options.items() for w in ("--set", f"{k}={v}")]
    rows = call("path", a.expert, b.expert, "--suite", suite.path, "--points", 5, *words, "--json").json()
    assert [row["time"] for row in rows] == [0, 0.25, 0.5, 0.75, 1]
    objective = suite.objective(["ants", "bees"])
    ends = [load_file(t.expert / "model.safetensors") for t in (a, b)]
    for row in rows[1:4]:
        path = mw.trajectory(*ends, objective, row["time"], **options)
        assert row["loss"] == pytest.approx(path.losses[-1], rel=1e-4)
        assert row["distance"] == pytest.approx(path.distances[-1], rel=1e-4)
        assert row["accuracies"] == {n: suite.accuracy(path.end, n) for n in ("ants", "bees")}
    assert rows[0]["loss"] == pytest.approx(float(objective(ends[0])), rel=1e-5)
    assert rows[0]["accuracies"] == {n: suite.accuracy(ends[0], n) for n in ("ants", "bees")}


def test_options_of_a_path_make_a_difference(suite, call):
    a, b = suite.task("ants").expert, suite.task("bees").expert
    words = ("path", a, b, "--suite", suite.path, "--points", 3, "--json")
    plain, guided = call(*words).json(), call(*words, "--set", "guidance=0.5").json()
    assert plain[1]["loss"] != guided[1]["loss"]


def test_a_path_with_an_objective_of_ones_own(stream, call, tmp_path, monkeypatch):
    (tmp_path / "own_loss.py").write_text(
        "def loss(params):\n    return sum(p.square().sum() for p in params.values() if p.is_floating_point())\n"
    )
    monkeypatch.chdir(tmp_path)
    s = stream(2)
    rows = call("path", *s.arrivals, "--objective", "own_loss:loss", "--points", 3, "--json").json()
    assert [row["accuracies"] for row in rows] == [{}] * 3
    first = sum(float(t.square().sum()) for t in s.arrival_tensors[0].values() if t.is_floating_point())
    assert rows[0]["loss"] == pytest.approx(first, rel=1e-5)
    shown = call("path", *s.arrivals, "--objective", "own_loss:loss", "--points", 3).ok().out
    assert len(shown.splitlines()) == 4


def test_mistakes(suite, stream, call):
    a, b = suite.task("ants").expert, suite.task("bees").expert
    assert "either --suite or --objective" in call("path", a, b).mistake()
    assert "either --suite or --objective" in call("path", a, b, "--suite", suite.path, "--objective", "a:b").mistake()
    assert "at least the two ends" in call("path", a, b, "--suite", suite.path, "--points", 1).mistake()
    assert "did you mean 'solver'" in call("path", a, b, "--suite", suite.path, "--set", "solvr=heun").mistake()
    assert "is not an expert of suite" in call("path", suite.base, b, "--suite", suite.path).mistake()
    assert "tensor" in call("path", a, stream(1).base, "--suite", suite.path).mistake()
