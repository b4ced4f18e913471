"""A benchmark on a tiny suite: its run directory, its figures, and what a kill or a second process changes (nothing)."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import tiny
from safetensors.torch import load_file

import mergeway as mw
from mergeway.bench import bench, stream
from mergeway.bench.processes import process_cells
from mergeway.bench.protocol import orders, plan, utilities
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.rules import RULES as ALL_RULES

RULES = ["average", "iso:scaling=0.5", "ode:step=0.25"]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return mw.load_suite(tiny.vision_suite(tmp_path_factory.mktemp("suite")))


@pytest.fixture(scope="module")
def run(suite, tmp_path_factory):
    """A finished run of three rules in two orders."""
    out = tmp_path_factory.mktemp("run") / "run"
    return out, bench(suite.path, RULES, orders=2, samples=12, out=out)


def files(out) -> dict[str, bytes]:
    """Every file of a run that must not differ."""
    found = {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}
    assert found.pop("timings.jsonl")
    return found


# --- what a run holds -------------------------------------------------------------------------------------------------


def test_files_of_a_run(run, suite):
    out, result = run
    found = files(out)
    keys = [f"{rule}.3.{number}" for rule in RULES for number in (0, 1)]
    assert set(found) == {"run.json", "ends.json", "folds.jsonl"} | {
        f"matrices/{key.replace(':', '_')}.csv" for key in keys
    }
    described = json.loads(found["run.json"])
    assert described["suite"] == "tiny"
    assert described["rules"] == RULES
    assert described["samples"] == 12
    rows = [json.loads(line) for line in found["folds.jsonl"].splitlines()]
    assert [(row["key"], row["fold"]) for row in rows] == [(key, fold) for key in keys for fold in (1, 2, 3)]
    assert all("seconds" not in row for row in rows)
    timings = [json.loads(line) for line in (out / "timings.jsonl").read_text().splitlines()]
    assert [(t["key"], t["fold"]) for t in timings] == [(row["key"], row["fold"]) for row in rows]
    assert all(t["seconds"] > 0 for t in timings)
    assert len(result.finished()) == 6


def test_matrices_are_what_folding_gives(run, suite):
    """Each row of a matrix is the model after so many folds, judged on the tasks folded so far."""
    out, _ = run
    order = orders([t.name for t in suite.tasks], 2)[1]
    lines = (out / "matrices" / "average.3.1.csv").read_text().splitlines()
    assert lines[0] == ",".join(["after", *order])
    experts = [load_file(suite.task(n).expert / "model.safetensors") for n in order]
    for k, line in enumerate(lines[1:], 1):
        merged = mw.merge(suite.base, experts[:k], "average")
        expected = [f"{suite.accuracy(merged, n):.4f}" for n in order[:k]]
        assert line.split(",") == [order[k - 1], *expected, *[""] * (3 - k)]


def test_rows_are_the_metrics_of_the_matrices(run, suite):
    out, result = run
    base, experts = (json.loads((out / "ends.json").read_text())[side] for side in ("base", "experts"))
    assert base == {t.name: suite.accuracy(load_file(suite.base / "model.safetensors"), t.name) for t in suite.tasks}
    for row in result.rows():
        matrices = []
        for number in (0, 1):
            key = f"{row['rule']}.3.{number}".replace(":", "_")
            lines = [line.split(",")[1:] for line in (out / "matrices" / f"{key}.csv").read_text().splitlines()[1:]]
            matrices.append([[float(cell or "nan") for cell in line] for line in lines])
        accs = [np.mean(m[-1]) for m in matrices]
        bwts = [np.mean([m[-1][i] - m[i][i] for i in range(2)]) for m in matrices]
        assert row["acc"] == pytest.approx(np.mean(accs), abs=1e-3)
        assert row["acc_std"] == pytest.approx(np.std(accs), abs=1e-3)
        assert row["bwt"] == pytest.approx(np.mean(bwts), abs=1e-3)
        assert row["bwt_std"] == pytest.approx(np.std(bwts), abs=1e-3)
        assert row["fwt"] == pytest.approx(np.mean([_before_its_turn(suite, row["rule"], n, base) for n in (0, 1)]))
        ends = [np.mean(list(side.values())) for side in (base, experts)]
        assert row["gap"] == pytest.approx(100 * (np.mean(accs) - ends[0]) / (ends[1] - ends[0]), abs=1e-2)
        # Steps of 0.25 to 1/2 and to 1/3: two gradients each.
        assert row["gradients"] == (4 if row["rule"].startswith("ode") else 0)
        assert row["seconds"] > 0


def _before_its_turn(suite, rule: str, number: int, base: dict[str, float]) -> float:
    """The mean of what the model reaches on a task just before it is folded in, minus the base."""
    order = orders([t.name for t in suite.tasks], 2)[number]
    name, *options = rule.split(":")
    chosen = mw.rules.make(name, dict(pair.split("=") for pair in options))
    objective = suite.objective(list(order), size=12, seed=number)
    gains = []
    for k in (1, 2):
        merged = mw.merge(suite.base, [suite.task(n).expert for n in order[:k]], chosen, None, objective)
        gains.append(suite.accuracy(merged, order[k]) - base[order[k]])
    return float(np.mean(gains))


def test_json_is_the_contract(suite, call, tmp_path):
    words = ("bench", suite.path, "--rules", "average,magmax", "--orders", 1, "--tasks", "2,3")
    told = call(*words, "--json").json()
    assert set(told) == {"suite", "base", "experts", "base_loss", "experts_loss", "rows"}
    assert told["suite"] == "tiny"
    assert 0 <= told["base"] <= told["experts"] <= 100
    wanted = {"rule", "tasks", "acc", "acc_std", "bwt", "bwt_std", "gap", "gradients", "seconds"}
    more = {"forgetting", "forgetting_std", "fwt", "fwt_std", "gap_std", "loss", "loss_gap"}
    assert [set(row) for row in told["rows"]] == [wanted | more] * 4
    assert {(row["rule"], row["tasks"]) for row in told["rows"]} == {
        (rule, n) for rule in ("average", "magmax") for n in (2, 3)
    }
    shown = call(*words).ok().out
    for row in told["rows"]:
        assert f"{row['acc']:.1f} ± {row['acc_std']:.1f}" in shown


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_orders_and_utilities_are_seeded(suite):
    names = [t.name for t in suite.tasks]
    assert orders(names, 5) == orders(names, 5)
    assert orders(names, 5)[:2] == orders(names, 2)
    assert len({*orders(names, 20)}) > 3
    assert all(sorted(order) == sorted(names) for order in orders(names, 5))
    assert utilities(3, 0, "uniform") == (1.0, 1.0, 1.0)
    drawn = utilities(3, 0, "random")
    assert drawn == utilities(3, 0, "random") != utilities(3, 1, "random")
    assert sum(drawn) == pytest.approx(1)
    assert min(drawn) > 0


def test_every_rule_meets_the_same_streams(suite):
    cells = plan(suite, RULES, [2, 3], 2, "random", 12)
    assert len({c.key for c in cells}) == len(cells) == 3 * 2 * 2
    for length in (2, 3):
        for number in (0, 1):
            alike = [c for c in cells if len(c.order) == length and c.number == number]
            assert len({(c.order, c.weights) for c in alike}) == 1


def test_utilities_reach_rules_and_metrics(suite, run):
    _, uniform = run
    weighted = bench(suite.path, ["average"], orders=1, utilities="random")
    cell, folds = weighted.finished()[0]
    experts = [suite.task(n).expert for n in cell.order]
    merged = mw.merge(suite.base, experts, "average", list(cell.weights))
    final = [suite.accuracy(merged, n) for n in cell.order]
    assert list(folds[-1].accuracies) == final
    assert weighted.rows()[0]["acc"] == pytest.approx(np.average(final, weights=cell.weights))
    # Equal weights of any size are no weights at all, exactly.
    cell, folds = uniform.finished()[0]
    assert set(cell.weights) == {1.0}
    assert uniform._row("average", 3, [(cell, folds)])["acc"] == mw.metrics.acc(
        [[*f.accuracies, *[0.0] * (3 - f.fold)] for f in folds]
    )


# --- killed, resumed, side by side ------------------------------------------------------------------------------------

WORDS = ("--rules", ",".join(RULES), "--orders", 2, "--samples", 12)


def test_two_processes_are_the_same_bytes(run, suite, call, tmp_path):
    out, result = run
    again = call("bench", suite.path, *WORDS, "--jobs", 2, "--out", tmp_path / "run", "--json").json()
    assert files(tmp_path / "run") == files(out)
    volatile = {"seconds"}
    for ours, theirs in zip(again["rows"], result.as_json()["rows"], strict=True):
        assert {k: v for k, v in ours.items() if k not in volatile} == {
            k: v for k, v in theirs.items() if k not in volatile
        }


class Counting(Progress):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.total, self.unit, self.advanced = None, "", []

    def begin(self, what: str, total: int | None, unit: str) -> None:
        self.total, self.unit, self.advanced = total, unit, []

    def advance(self, done: int) -> None:
        self.advanced.append(done)


@pytest.mark.parametrize("jobs", [1, 2])
def test_progress_goes_on_with_every_fold(suite, jobs):
    heard = Counting()
    bench(suite.path, ["average"], orders=2, jobs=jobs, progress=heard)
    assert (heard.total, heard.unit) == (6, "folds")
    assert heard.advanced == [0, *[1] * 6]


def test_a_worker_that_dies_is_told_in_one_line(suite, tmp_path):
    """What was finished is kept, and the run goes on from there to the same bytes."""

    class Killing(Counting):
        def advance(self, done: int) -> None:
            super().advance(done)
            if self.unit == "folds" and sum(self.advanced) == 1:
                multiprocessing.active_children()[0].kill()

    bench(suite.path, ["average"], orders=40, out=tmp_path / "whole")
    with pytest.raises(OptionError, match=r"jobs 2: a worker process was killed.*resume"):
        bench(suite.path, ["average"], orders=40, jobs=2, out=tmp_path / "run", progress=Killing())
    bench(suite.path, ["average"], orders=40, jobs=2, out=tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


class Noted(stream.Underway):
    """Leaves a directory behind for every stream that is begun."""

    def read(self):
        self.directory.mkdir()
        return super().read()


def test_a_mistake_in_one_stream_is_told_before_the_others_have_run(suite, tmp_path):
    cells = [*plan(suite, ["steer"], [3], 1, "uniform", 2), *plan(suite, ["average"], [3], 200, "uniform", 12)]
    todo = [(cell, Noted(tmp_path / cell.key)) for cell in cells]
    with pytest.raises(OptionError, match="2 calibration samples for 3 tasks"):
        list(process_cells(suite.path, None, Compute(), todo, 2, SILENT))
    assert len(list(tmp_path.iterdir())) < 100


# Folds are told on stdout, so that a kill falls between two of them; every fold is kept, however quick it was.
TOLD = """
import sys, time
from mergeway.bench import files, stream
from mergeway.cli import main
stream.KEEP_AFTER = 0.0
plain = files.RunFiles.append
def told(self, cell, fold):
    plain(self, cell, fold)
    print("fold", flush=True)
    time.sleep(0.1)
files.RunFiles.append = told
sys.exit(main(sys.argv[1:]))
"""


def _killed_after(words: list[str], folds: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", TOLD, *words], stdout=subprocess.PIPE, text=True)
    for _ in range(folds):
        assert process.stdout.readline() == "fold\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()


def test_resumed_after_two_kills(run, suite, call, tmp_path):
    """A real process, killed twice amid a stream: no finished fold is done again, and the bytes are the same."""
    out = tmp_path / "run"
    words = ["bench", str(suite.path), *map(str, WORDS), "--out", str(out)]
    _killed_after(words, 5)
    first = _timings(out)
    assert list(first) == [
        ("average.3.0", 1),
        ("average.3.0", 2),
        ("average.3.0", 3),
        ("average.3.1", 1),
        ("average.3.1", 2),
    ]
    # The last line may be half written.
    with open(out / "folds.jsonl", "a") as file:
        file.write('{"key": "average.3.1", "fo')
    _killed_after([*words, "--resume"], 6)
    second = _timings(out)
    assert len(second) == 9
    call(*words, "--resume").ok()
    assert files(out) == files(run[0])
    # A fold that had been done again would have taken another time.
    last = _timings(out)
    assert len(last) == 18
    assert last | second == last
    assert second | first == second


def _timings(out) -> dict[tuple[str, int], float]:
    rows = map(json.loads, (out / "timings.jsonl").read_text().splitlines())
    return {(row["key"], row["fold"]): row["seconds"] for row in rows}


@pytest.mark.parametrize("rule", sorted(ALL_RULES))
def test_every_rule_goes_on_from_its_memory(suite, monkeypatch, tmp_path, rule):
    monkeypatch.setattr(stream, "KEEP_AFTER", 0.0)
    cell = plan(suite, [rule], [3], 1, "random", 24)[0]
    whole = list(stream.run_cell(suite, cell))
    for stop in (1, 2):
        underway = stream.Underway(tmp_path / str(stop))
        begun = list(itertools.islice(stream.run_cell(suite, cell, underway), stop))
        again = list(stream.run_cell(suite, cell, underway))
        assert again[:stop] == begun
        assert [replace(fold, seconds=0.0) for fold in again] == [replace(fold, seconds=0.0) for fold in whole]


def test_resuming_a_finished_run_does_nothing(run, suite, call, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run[0], out)
    timings = (out / "timings.jsonl").read_bytes()
    call("bench", suite.path, *WORDS, "--out", out, "--resume").ok()
    assert files(out) == files(run[0])
    assert (out / "timings.jsonl").read_bytes() == timings


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rules", "averag"), "did you mean 'average'"),
        (("--rules", "iso:scaling"), "expected name:key=value"),
        (("--rules", "iso:skaling=1"), "did you mean 'scaling'"),
        (("--rules", "iso:scaling=high"), "it takes a number"),
        (("--tasks", "9"), "has 3 tasks"),
        (("--tasks", "two"), "expected whole numbers"),
        (("--orders", "0"), "at least 1"),
        (("--jobs", "0"), "at least 1"),
        (("--utilities", "normal"), "uniform or random"),
        (("--engine", "spark"), "it takes local or ray"),
        (("--resume",), "--resume"),
    ],
)
def test_mistakes(suite, call, tmp_path, words, said):
    assert said in call("bench", suite.path, "--rules", "average", *words).mistake()
    said_again = call("bench", suite.path, "--rules", "average", *words, "--out", tmp_path / "run")
    if words != ("--resume",):
        assert said in said_again.mistake()
        assert not (tmp_path / "run").exists()


def test_other_directories_are_left_alone(run, suite, call, tmp_path):
    out, _ = run
    before = files(out)
    assert "pass --resume" in call("bench", suite.path, *WORDS, "--out", out).mistake()
    other = call("bench", suite.path, "--rules", "average", "--orders", 2, "--out", out, "--resume").mistake()
    assert "another suite, rules or protocol" in other
    assert files(out) == before
    (tmp_path / "letter.txt").write_text("dear")
    assert "exists and is not a run" in call("bench", suite.path, *WORDS, "--out", tmp_path).mistake()
    assert "exists and is not a run" in call("bench", suite.path, *WORDS, "--out", tmp_path / "letter.txt").mistake()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    assert "run.json" in call("bench", suite.path, *WORDS, "--out", tmp_path / "broken", "--resume").mistake()


def test_an_expert_that_does_not_fit(suite, tmp_path):
    copy = tmp_path / "suite"
    shutil.copytree(suite.path, copy)
    shutil.rmtree(copy / "experts" / "bees")
    with pytest.raises(OptionError, match="of task 'bees' does not exist"):
        bench(copy, ["average"], orders=1)
