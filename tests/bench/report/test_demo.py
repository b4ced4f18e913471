"""The demo: its table, its files, and what it does when it is run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written import embedded

import mergeway.bench.demo
from mergeway.bench.demo import takeaways
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
    lines = [line.split() for line in out.splitlines() if line]
    first, last = (next(line for line in lines if line[0] == end) for end in ("base", "experts"))
    order = [line[0] for line in lines]
    assert order.index("base") < order.index("average") < order.index("experts")
    # The ends are those of the four tasks that were folded.
    page_data = embedded(page)
    for line, side in ((first, "base"), (last, "experts")):
        measured = [page_data[side][task] for task in page_data["streams"][0]["order"]]
        assert float(line[1]) == pytest.approx(sum(measured) / 4, abs=0.051)
    assert [s["rule"] for s in embedded(page)["streams"]] == ["average"]


def row(rule, gap):
    return {"rule": rule, "acc": 60 + gap / 10, "gap": gap}


def test_takeaways_are_the_figures_of_the_table():
    rows = [row("average", 15.0), row("opcm", -5.0), row("iso", 36.0), row("steer:steps=8:most=64", 58.0)]
    said = takeaways({"suite": "digits-light", "base": 60.0, "experts": 70.0, "rows": rows})
    assert "steer comes nearest" in said[0] and "58 %" in said[0] and "15 %" in said[0]
    assert "iso" in said[1] and "36 %" in said[1]
    assert said[2].startswith("1 of 4 rules end below the base")
    assert "mergeway demo digits" in said[3] and len(said) == 4
    # With nothing below the base and nothing better than averaging there is less to say.
    (alone,) = takeaways({"suite": "other", "base": 60.0, "experts": 70.0, "rows": rows[:1]})
    assert alone == "average comes nearest to the experts: 15 % of the way from the base."
    # Two that end at the same accuracy are both named.
    (both, *_) = takeaways({"suite": "other", "base": 60.0, "experts": 70.0, "rows": [*rows, row("opcm", 58.0)]})
    assert both.startswith("steer and opcm come nearest to the experts: 58 %")


def test_unknown_demo_is_a_mistake(call, tmp_path):
    assert "did you mean 'digits-light'" in call("demo", "digits-ligth", "--out", tmp_path).mistake()


def test_demo_replaces_nothing_but_a_demo(small, call, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert "is no earlier demo" in call("demo", "--out", tmp_path).mistake()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"suite": "other"}))
    assert "is no earlier demo" in call("demo", "--out", tmp_path).mistake()
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["digits", "digits-light"])
def test_whole_demo(run, tmp_path, suite):
    result = run("demo", suite, "--out", tmp_path, "--json").json()
    assert {r["rule"].partition(":")[0] for r in result["rows"]} == set(RULES)
    rows = {r["rule"]: r for r in result["rows"]}
    assert all(r["tasks"] == 8 for r in rows.values())
    assert result["base"] < rows["average"]["acc"] < result["experts"]
    assert embedded(tmp_path / "report.html")["headline"]["rows"] == result["rows"]
