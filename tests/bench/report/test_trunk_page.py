"""The page of a trunk: its journal, and distances and cosines that NumPy finds too."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from mergeway import Trunk


def flat(path) -> np.ndarray:
    """All floating-point values of a file, in the order of their names."""
    tensors = load_file(path)
    return np.concatenate([t.astype(np.float64).ravel() for _, t in sorted(tensors.items()) if t.dtype.kind == "f"])


@pytest.fixture
def made(stream, tmp_path):
    files = stream(3)
    trunk = Trunk.create(tmp_path / "trunk", files.base, "average", keep=5)
    for k, path in enumerate(files.arrivals):
        trunk.add(path, weight=1.0 + k)
    return trunk, files


def test_journal_is_shown_whole(made, report):
    trunk, _ = made
    trunk.rollback(2)
    page, data = report(trunk.path)
    assert [(r["step"], r["kind"], r["result"], r["hash"]) for r in data["journal"]] == [
        (r.step, r.kind, r.result, r.hash) for r in trunk.log()
    ]
    assert [h["task"] for h in data["held"]] == ["task1", "task2"]
    text = page.read_text()
    assert text.count('<li class="add">') == 3
    assert "rollback to step 2" in text


def test_drift_is_the_distance_from_the_base(made, report):
    trunk, files = made
    _, data = report(trunk.path)
    base, updates = flat(files.base), [flat(a) - flat(files.base) for a in files.arrivals]
    weights = np.array([1.0, 2.0, 3.0])
    expected = [0.0]
    for k in range(1, 4):
        expected.append(
            np.linalg.norm(sum(w * u for w, u in zip(weights[:k], updates, strict=False)) / weights[:k].sum())
        )
    assert base.size
    assert [d["step"] for d in data["drift"]] == [0, 1, 2, 3]
    assert [d["norm"] for d in data["drift"]] == pytest.approx(expected, rel=1e-5)
    assert [a["norm"] for a in data["arrivals"]] == pytest.approx([np.linalg.norm(u) for u in updates])


def test_cosines_are_those_of_the_updates(made, report):
    trunk, files = made
    _, data = report(trunk.path)
    updates = np.stack([flat(a) - flat(files.base) for a in files.arrivals])
    units = updates / np.linalg.norm(updates, axis=1, keepdims=True)
    np.testing.assert_allclose(data["cosines"], units @ units.T, atol=1e-9)


def test_arrivals_that_are_gone_or_changed_are_named(made, report):
    trunk, files = made
    files.arrivals[0].unlink()
    files.arrivals[1].write_bytes(files.arrivals[2].read_bytes())
    page, data = report(trunk.path)
    assert data["cosines"] is None
    assert [a["task"] for a in data["arrivals"]] == ["task3"]
    assert "'task1' cannot be read" in data["problems"][0]
    assert "has changed since it was folded in" in data["problems"][1]
    assert "1 of 3 can" in page.read_text()


def test_trunk_without_its_base_is_still_reported(made, report):
    trunk, files = made
    files.base.unlink()
    page, data = report(trunk.path)
    assert data["drift"] == []
    assert "the drift is not known" in page.read_text()
    assert len(data["journal"]) == 4


def test_fresh_trunk_is_reported(stream, tmp_path, report):
    files = stream(1)
    Trunk.create(tmp_path / "trunk", files.base, "opcm")
    _, data = report(tmp_path / "trunk")
    assert data["drift"] == [{"step": 0, "norm": 0.0}]
    assert data["held"] == []


def test_certificates_are_those_of_the_journal(stream, tmp_path, report):
    files = stream(3)
    trunk = Trunk.create(tmp_path / "trunk", files.base, "ode", step=0.1)
    for path in files.arrivals:
        trunk.add(path, objective=lambda params: sum((p**2).sum() for p in params.values()))
    _, data = report(trunk.path)
    recorded = [r.details["trajectory"] for r in trunk.log() if "trajectory" in r.details]
    assert len(recorded) == 2
    for shown, path in zip(data["trajectories"], recorded, strict=True):
        assert {k: shown[k] for k in path} == path


def test_suite_makes_no_sense_for_a_trunk(made, call, tmp_path):
    assert "leave it out" in call("report", made[0].path, "--suite", "x", "--out", tmp_path / "r.html").mistake()
