"""The demo: its table, its files, and what it does when it is run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written import embedded

import mergeway.bench.demo
from mergeway.rules import RULES


@pytest.fixture
def small(suite, monkeypatch):
    """The demo's steps on the tiny suite."""
    monkeypatch.setattr(mergeway.bench.demo, "embedded", lambda name: suite)
    monkeypatch.setattr(mergeway.bench.demo, "SAMPLES", 16)
    monkeypatch.setattr(mergeway.bench.demo, "JOBS", 1)


def test_quick_demo(small, call, tmp_path, monkeypatch):
    result = call("demo", "--quick", "--out", tmp_path / "demo", "--json").json()
    assert {r["rule"] for r in result["rows"]} == {"average", "opcm", "iso", "ode", "steer"}
    page = Path(result["report"])
    assert page == tmp_path / "demo" / "report.html"
    data = embedded(page)
    assert data["headline"]["rows"] == result["rows"]
    assert len(data["sweep"]["order"]) == 4
    # A second demo in the same place takes the place of the first; --quiet prints the table all the same.
    monkeypatch.setattr(mergeway.bench.demo, "_QUICK", ("average",))
    out = call("demo", "--quick", "--out", tmp_path / "demo", "--quiet").ok().out
    assert f"report: {page}" in out
    assert "average" in out and "steer" not in out and "mean ± std over 1 order;" in out
    assert [s["rule"] for s in embedded(page)["streams"]] == ["average"]


def test_demo_replaces_nothing_but_a_demo(small, call, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert "is no earlier demo" in call("demo", "--out", tmp_path).mistake()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"suite": "other"}))
    assert "is no earlier demo" in call("demo", "--out", tmp_path).mistake()
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
def test_whole_demo(run, tmp_path):
    result = run("demo", "--out", tmp_path, "--json").json()
    assert {r["rule"].partition(":")[0] for r in result["rows"]} == set(RULES)
    rows = {r["rule"]: r for r in result["rows"]}
    assert all(r["tasks"] == 8 for r in rows.values())
    assert result["base"] < rows["average"]["acc"] < result["experts"]
    assert embedded(tmp_path / "report.html")["headline"]["rows"] == result["rows"]
