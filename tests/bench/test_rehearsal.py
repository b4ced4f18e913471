"""`bench --dry-run`: everything is there, so much is to be judged, and nothing is run."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.vision_suite(tmp_path_factory.mktemp("vision") / "suite")


def test_what_would_be_judged(folder, call, tmp_path, monkeypatch):
    """Three tasks of 20 test pictures: 20 + 20, 40 + 20 and 60 along a stream, and 120 for base and experts."""
    import mergeway.bench.run

    monkeypatch.setattr(mergeway.bench.run, "bench", None)  # nothing may be run
    how = ["--rules", "average,steer", "--orders", 2, "--samples", 16, "--dry-run"]
    found = call("bench", folder, *how, "--out", tmp_path / "run", "--json").json()
    assert (found["streams"], found["folds"], found["judged"]) == (4, 12, 120 + 4 * 160)
    assert found["needing_data"] == ["steer"]
    assert found["seconds"] == pytest.approx(found["judged"] * found["seconds_each"])
    assert found["kept"] == 2 * 4 * found["parameters"]  # steer keeps a sum and what was taught
    assert not (tmp_path / "run").exists()


def test_the_count_is_that_of_a_run(folder, call, monkeypatch):
    from mergeway.bench.suite import Suite

    seen, real = [], Suite.judge
    monkeypatch.setattr(
        Suite,
        "judge",
        lambda self, params, names, *rest, **more: seen.extend(names) or real(self, params, names, *rest, **more),
    )
    call("bench", folder, "--rules", "average", "--orders", 2).ok()
    told = call("bench", folder, "--rules", "average", "--orders", 2, "--dry-run", "--json").json()
    assert told["judged"] == 20 * len(seen)


def test_in_words(folder, call):
    said = call("bench", folder, "--rules", "average", "--orders", 1, "--dry-run").ok().out
    assert "base, experts, heads and data are there and fit" in said and "nothing was run" in said


def test_what_is_missing(folder, call, tmp_path):
    spoilt = shutil.copytree(folder, tmp_path / "suite")
    (spoilt / "data" / "bees.npz").unlink()
    assert "bees.npz" in call("bench", spoilt, "--dry-run").mistake()
    suite = json.loads((folder / "suite.json").read_text())
    del suite["tasks"][1]["expert"]
    spoilt = shutil.copytree(folder, tmp_path / "other")
    (spoilt / "suite.json").write_text(json.dumps(suite))
    assert "comes without an expert" in call("bench", spoilt, "--dry-run").mistake()


def test_not_with_tables(folder, call):
    assert "--dry-run: tables and figures" in call("bench", folder, "--table", "1", "--dry-run").mistake()
