"""A sweep recorded for a real run: its ends and the scheduled time are models that can be had another way."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

import mergeway as mw
from mergeway.bench.suite import load_suite


@pytest.fixture
def swept_run(suite, tmp_path, call):
    words = (
        "bench",
        suite,
        "--rules",
        "average,ode",
        "--tasks",
        2,
        "--orders",
        1,
        "--samples",
        16,
        "--out",
        tmp_path / "run",
    )
    call(*words, "--json").json()
    call("report", tmp_path / "run", "--suite", suite, "--out", tmp_path / "report.html").ok()
    return tmp_path / "run"


def test_undamped_sweep_leads_from_one_expert_to_the_other(suite, tmp_path, call):
    run = tmp_path / "run"
    call("bench", suite, "--rules", "ode:barrier=none", "--tasks", 2, "--orders", 1, "--samples", 16, "--out", run).ok()
    call("report", run, "--suite", suite, "--out", tmp_path / "report.html").ok()
    sweep = json.loads((run / "sweep.json").read_text())
    assert sweep["rule"] == "ode:barrier=none"
    assert sweep["times"] == pytest.approx([i / 10 for i in range(11)])
    judge = load_suite(suite)
    for time, name in zip((0, 10), sweep["order"], strict=True):
        expert = load_file(suite / "experts" / name / "model.safetensors")
        assert {t: sweep["accuracies"][t][time] for t in sweep["order"]} == {
            t: judge.accuracy(expert, t) for t in sweep["order"]
        }


def test_scheduled_time_is_the_merge_of_the_run(swept_run):
    sweep = json.loads((swept_run / "sweep.json").read_text())
    folds = [json.loads(line) for line in (swept_run / "folds.jsonl").read_text().splitlines()]
    merged = next(f for f in folds if f["key"].startswith("ode.2.0") and f["fold"] == 2)
    # Two equal tasks: w/Σw = ½, which is among the recorded times.
    assert [sweep["accuracies"][t][5] for t in sweep["order"]] == merged["accuracies"]
    shared = len(merged["details"]["trajectory"]["losses"]) - 1
    assert sweep["trajectory"]["losses"][:shared] == merged["details"]["trajectory"]["losses"][:shared]


def test_sweep_stays_for_the_next_report(swept_run, call, tmp_path):
    before = (swept_run / "sweep.json").read_bytes()
    call("report", swept_run, "--out", tmp_path / "report.html").ok()
    assert (swept_run / "sweep.json").read_bytes() == before
    assert "operating time t" in (tmp_path / "report.html").read_text()


def test_another_suite_is_refused(written, suite, call, tmp_path):
    text = (written.path / "run.json").read_text()
    (written.path / "run.json").write_text(text.replace('"tiny"', '"other"'))
    said = call("report", written.path, "--suite", suite, "--out", tmp_path / "r.html").mistake()
    assert "the run is on 'other'" in said
    assert not (written.path / "sweep.json").exists()


def test_run_without_ode_is_swept_with_its_defaults(suite, tmp_path, call):
    call(
        "bench", suite, "--rules", "average", "--tasks", 2, "--orders", 1, "--samples", 16, "--out", tmp_path / "run"
    ).ok()
    call("report", tmp_path / "run", "--suite", suite, "--out", tmp_path / "report.html").ok()
    sweep = json.loads((tmp_path / "run" / "sweep.json").read_text())
    assert sweep["rule"] == "ode"
    assert sweep["trajectory"]["solver"] == mw.rules.Ode().solver
