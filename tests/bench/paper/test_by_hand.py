"""The numbers of tables and figures, worked out by hand from runs that are written by hand."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import scipy.stats
import tiny
import written_study
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mergeway.bench.paper import (
    ablation,
    comparison,
    curves,
    histograms,
    per_task,
    sensitivity,
    similarity,
    trajectories,
)
from mergeway.bench.paper.study import default_lengths, with_option
from mergeway.bench.protocol import orders, utilities
from mergeway.errors import OptionError

FIRST = [[90.0], [80.0, 70.0], [84.0, 61.0, 50.0]]
SECOND = [[80.0], [70.0, 60.0], [60.0, 62.0, 64.0]]


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return tiny.vision_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture
def study(suite, tmp_path):
    return written_study.empty(suite, tmp_path / "out", ["average", "ode"])


def shown(table) -> list[list[str]]:
    return table.texts()


def test_table_1(study):
    """ACC 65 and 62, BWT −7.5 and −9 for `average`; 10 and 10 more for `ode` after the last fold."""
    written_study.write_run(study, "average", [FIRST, SECOND])
    better = [[*m[:2], [a + 10 for a in m[2]]] for m in (FIRST, SECOND)]
    written_study.write_run(study, "ode", better)
    made = comparison.accuracy_and_transfer(study)
    assert made.columns == ("metric", "rule", "3 tasks")
    assert shown(made) == [
        ["ACC", "pre-trained", "30.0"],
        ["ACC", "fine-tuned", "80.0"],
        ["ACC", "continually fine-tuned", "n/a"],
        ["BWT", "continually fine-tuned", "n/a"],
        ["ACC", "average", "63.5 ± 1.5"],
        ["ACC", "ode", "73.5 ± 1.5"],
        ["BWT", "average", "-8.2 ± 0.8"],
        ["BWT", "ode", "1.8 ± 0.8"],
    ]
    assert [row[2].best for row in made.rows[4:]] == [False, True, False, True]
    assert made.breaks == (4, 6)


def test_table_2(study):
    """Weighted by the utilities of each order."""
    study.rules = ["average"]
    written_study.write_run(study, "average", [FIRST, SECOND], utilities="random")
    accs, bwts = [], []
    for number, matrix in enumerate((FIRST, SECOND)):
        w = utilities(3, number, "random")
        accs.append(sum(wi * a for wi, a in zip(w, matrix[2], strict=True)) / sum(w))
        changes = [matrix[2][i] - matrix[i][i] for i in range(2)]
        bwts.append((w[0] * changes[0] + w[1] * changes[1]) / (w[0] + w[1]))
    acc, bwt = (row[2] for row in comparison.weighted(study).rows)
    assert acc.mean == pytest.approx(np.mean(accs))
    assert acc.std == pytest.approx(np.std(accs))
    assert bwt.mean == pytest.approx(np.mean(bwts))
    assert bwt.std == pytest.approx(np.std(bwts))


def test_metrics(study):
    """Forgetting (6 + 9)/2 and (20 − 2)/2: in the second order task 2 ends at its best, so its fall is 0; the rest likewise."""
    study.rules = ["average"]
    written_study.write_run(study, "average", [FIRST, SECOND], ahead=[[45.0, 35.0], [50.0, 10.0]])
    table = comparison.all_metrics(study)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["forgetting"].mean == pytest.approx(((6 + 9) / 2 + (20 + 0) / 2) / 2)
    fwts = []
    for order, (second, third) in zip(orders(written_study.TASKS, 2), ([45.0, 35.0], [50.0, 10.0]), strict=True):
        fwts.append((second - written_study.BASE[order[1]] + third - written_study.BASE[order[2]]) / 2)
    assert row["FWT"].mean == pytest.approx(np.mean(fwts))
    # Base 30, experts 80: ACC 65 and 62 close 70 % and 64 % of the way.
    assert (row["gap closed"].mean, row["gap closed"].std) == (pytest.approx(67), pytest.approx(3))


def test_lowest_forgetting_is_the_best(study):
    written_study.write_run(study, "average", [FIRST, FIRST])
    written_study.write_run(study, "ode", [SECOND, SECOND])
    average, ode = comparison.all_metrics(study).rows
    assert (average[3].best, ode[3].best) == (True, False)  # 7.5 against 10
    assert average[3].mean == 7.5


def test_tables_3_and_4(study):
    """One run for each number of samples and each step; a run at the default shares that of the plain rule."""
    for n in sensitivity.SIZES:
        final = [[*m[:2], [float(n % 97)] * 3] for m in (FIRST, SECOND)]
        written_study.write_run(study, "ode", final, samples=n, name=f"ode-3-uniform-{n}")
    made = sensitivity.calibration_size(study)
    assert made.columns == ("rule", *map(str, sensitivity.SIZES))
    assert [cell.mean for cell in made.rows[0][1:]] == [n % 97 for n in sensitivity.SIZES]
    assert len(made.rows) == 1  # average needs no samples
    for step in sensitivity.STEPS:
        name = "ode" if step == 0.05 else f"ode:step={step}"
        gradients = [[{}, {"gradients": 1 / step}, {"gradients": 2.0}]] * 2
        written_study.write_run(study, name, [FIRST, SECOND], facts=gradients)
    rows = sensitivity.step_size(study).rows
    assert [row[0] for row in rows] == ["0.001", "0.0025", "0.005", "0.01", "0.025", "0.05", "0.1", "0.2"]
    assert [row[3].mean for row in rows] == pytest.approx([1 / s + 2 for s in sensitivity.STEPS])
    assert {str(row[1]) for row in rows} == {"63.50 ± 1.50"}


def test_table_5(study):
    """The first arrival of a stream does not count."""
    study.rules = ["ode"]
    facts = [[{"gradients": 99}, {"gradients": 10}, {"gradients": 7}], [{}, {"gradients": 10}, {"gradients": 7}]]
    written_study.write_run(study, "ode", [FIRST, SECOND], facts=facts, seconds=[[50, 1, 2], [50, 3, 4]])
    rule, seconds, gradients, needs = comparison.cost(study).rows[0]
    assert (rule, needs) == ("ode", "calibration")
    assert (seconds.mean, seconds.std) == (2.5, pytest.approx(math.sqrt(1.25)))
    assert (gradients.mean, gradients.std) == (8.5, 1.5)


def test_table_6(study):
    for start, target in trajectories.pairs_of(written_study.TASKS, 5):
        points = [{"accuracies": {start: 90.0 - i, target: 20.0 + 10 * i - (i > 5) * 20 * (i - 5)}} for i in range(11)]
        written_study.keep(study, f"sweep-{start}-{target}", {"rule": "ode", "samples": 12}, points)
    made = trajectories.two_task_sweeps(study)
    assert len(made.rows) == 15
    pair = made.rows[0][0].split(" → ")
    assert made.rows[0][1:3] == [pair[0], made.rows[0][2]]
    assert [c.mean for c in made.rows[0][2:]] == [90.0 - i for i in range(11)]
    means = made.rows[2][2:]
    assert [c.best for c in means] == [i == 5 for i in range(11)]  # (85 + 70)/2
    assert means[5].mean == 77.5


def test_pairs_differ_and_are_seeded():
    made = trajectories.pairs_of(["a", "b", "c", "d"], 5)
    assert len(set(made)) == 5
    assert made[:2] == trajectories.pairs_of(["a", "b", "c", "d"], 2)
    assert all(first != second for first, second in made)
    assert trajectories.pairs_of(["a"], 5) == []


def test_table_7(study):
    """Best times 1/2 then 1/4: retained 1/2 then 3/4, as the schedule's 1/2 and 2/3, so the ranks agree; and the reverse."""
    protocol = {"rule": "ode", "samples": 12, "times": trajectories.TIMES}

    def best_at(index: int) -> list[float]:
        return [50.0 + 10 * (i == index) for i in range(21)]

    written_study.keep(study, "schedule-3-0", protocol, [best_at(10), best_at(5)])
    written_study.keep(study, "schedule-3-1", protocol, [best_at(10), best_at(20)])
    correlation, offset = trajectories.time_schedule(study).rows
    assert (correlation[1].mean, correlation[1].std) == (pytest.approx(0), pytest.approx(1))
    assert offset[1].mean == pytest.approx((0 + 1 / 4 - 1 / 3 + 0 + 1 - 1 / 3) / 4)


def test_equally_good_times_keep_the_most(study):
    protocol = {"rule": "ode", "samples": 12, "times": trajectories.TIMES}
    written_study.keep(study, "schedule-3-0", protocol, [[50.0] * 21, [50.0] * 21])
    assert trajectories.best_times(study, 3, 0) == [0.0, 0.0]
    assert trajectories.spearman([0.5, 0.5], [0.1, 0.2]) is None


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=12))
def test_spearman_is_scipys(pairs):
    first, second = (list(map(float, side)) for side in zip(*pairs, strict=True))
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert trajectories.spearman(first, second) is None
    else:
        assert trajectories.spearman(first, second) == pytest.approx(scipy.stats.spearmanr(first, second).statistic)


def test_tables_by_task(study):
    written_study.write_run(study, "average", [FIRST, SECOND])
    written_study.write_run(study, "ode", [SECOND, FIRST])
    rows = shown(per_task.rules_by_task(study))
    assert rows[0] == ["continually fine-tuned", "n/a", "n/a", "n/a", "n/a"]
    for task, cell in zip(written_study.TASKS, rows[1][1:], strict=False):
        found = [m[2][o.index(task)] for m, o in zip((FIRST, SECOND), orders(written_study.TASKS, 2), strict=True)]
        assert cell == f"{np.mean(found):.1f} ± {np.std(found):.1f}"
    assert rows[1][-1] == "63.5 ± 1.5"
    assert shown(per_task.ends_by_task(study)) == [
        ["pre-trained", "20.0", "30.0", "40.0", "30.0"],
        ["fine-tuned", "90.0", "80.0", "70.0", "80.0"],
    ]


def test_ablation(study):
    """Each mechanism alone against none, and all of them against all but it; ends that are told apart by hand."""
    reached = {"": 50, "guidance=0.24": 55, "task_norm=0.25": 49, "barrier=constraints": 51, "barrier=backtracking": 52}
    reached |= {"refine=80": 53, "guidance=0.24:task_norm=0.25:barrier=per-task:refine=80": 70}
    reached |= {"task_norm=0.25:barrier=per-task:refine=80": 60, "guidance=0.24:barrier=per-task:refine=80": 71}
    reached |= {"guidance=0.24:task_norm=0.25:barrier=backtracking:refine=80": 66}
    reached |= {"guidance=0.24:task_norm=0.25:barrier=constraints:refine=80": 65}
    reached |= {"guidance=0.24:task_norm=0.25:barrier=per-task": 62}
    for options, end in reached.items():
        rule = ":".join(["ode", "step=0.05", *([options] if options else [])])
        written_study.write_run(study, rule, [[*matrix[:2], [float(end)] * 3] for matrix in (FIRST, SECOND)])
    assert [
        row[:1] + [cell.split(" ±")[0] for cell in row[1:]] for row in shown(ablation.released_mechanisms(study))
    ] == [
        ["none: the paper's γ", "50.0", "", "", ""],
        ["guidance", "55.0", "5.0", "60.0", "10.0"],
        ["task norm", "49.0", "-1.0", "71.0", "-1.0"],
        ["constraints", "51.0", "1.0", "66.0", "4.0"],
        ["backtracking", "52.0", "2.0", "65.0", "5.0"],
        ["refinement", "53.0", "3.0", "62.0", "8.0"],
        ["all", "70.0", "20.0", "", ""],
    ]


def test_bars_are_the_ends(study):
    figure = per_task.end_bars(study)
    heights = [round(bar.get_height(), 6) for bar in figure.axes[0].patches]
    assert heights == [20.0, 30.0, 40.0, 90.0, 80.0, 70.0]


def test_curves(study):
    written_study.write_run(study, "average", [FIRST, SECOND])
    over = curves.over_the_stream(study.run(["average"]), "average")
    assert over.tolist() == [[90, 75, 65], [80, 65, 62]]
    lambdas = [[{"lambda": 1.0}, {"lambda": 1.3}, {"lambda": 1.6}]] * 2
    written_study.write_run(study, "opcm", [FIRST, SECOND], facts=lambdas)
    assert curves.scaling_factors(study.run(["opcm"])).tolist() == [[1.0, 1.3, 1.6]] * 2


def test_histogram_counts_each_step_once(study):
    path = {"times": [0.0, 0.05, 0.1], "gammas": [1.0, 0.4, 0.4], "alignments": [0.1, 0.2, 0.2]}
    written_study.write_run(study, "ode", [FIRST, SECOND], trajectories=[[{}, path, path], [{}, path, {}]])
    assert histograms.along_the_way(study.run(["ode"]), "gammas") == ([0.0, 0.05] * 3, [1.0, 0.4] * 3)
    assert histograms.along_the_way(study.run(["ode"]), "alignments")[1] == [0.1, 0.2] * 3


def test_cosines(study, suite):
    """In float64 NumPy over all parameters at once."""
    base = load_file(suite / "base" / "model.safetensors")
    vectors = []
    for task in written_study.TASKS:
        expert = load_file(suite / "experts" / task / "model.safetensors")
        deltas = [expert[n].astype(np.float64) - base[n] for n in base if base[n].dtype.kind == "f"]
        vectors.append(np.concatenate([d.ravel() for d in deltas]))
    unit = np.array([v / np.linalg.norm(v) for v in vectors])
    assert similarity.cosines(study) == pytest.approx(unit @ unit.T, abs=1e-9)


def test_continual_fine_tuning(suite, tmp_path):
    """Trained on task after task in the order of each stream, with what the suite says of its training."""
    from mergeway.train import Training, finetune

    copy = tmp_path / "suite"
    shutil.copytree(suite, copy)
    described = json.loads((copy / "suite.json").read_text())
    (copy / "suite.json").write_text(json.dumps(described | {"training": {"steps": 3, "lr": 0.01, "batch": 8}}))
    study = written_study.empty(copy, tmp_path / "out", ["average"])
    written_study.write_run(study, "average", [FIRST, SECOND])
    ends, transfers = [], []
    for seed, order in enumerate(orders(written_study.TASKS, 2)):
        params, seen = None, []
        for k, task in enumerate(order, 1):
            training = Training(steps=3, lr=0.01, batch=8, seed=seed)
            params = finetune(study.suite, task, start=params, training=training).params
            seen.append([study.suite.accuracy(params, t) for t in order[:k]])
        ends.append(dict(zip(order, seen[-1], strict=True)))
        transfers.append(np.mean([seen[2][i] - seen[i][i] for i in range(2)]))
    by_task = [np.mean([end[task] for end in ends]) for task in written_study.TASKS]
    made = per_task.rules_by_task(study).rows[0]
    assert [c.mean for c in made[1:]] == pytest.approx([*by_task, np.mean(by_task)])
    first = comparison.accuracy_and_transfer(study)
    assert [row[2].mean for row in first.rows[2:4]] == pytest.approx([np.mean(by_task), np.mean(transfers)])
    assert len(list((tmp_path / "out" / "kept").glob("continual-3-*.json"))) == 2


def test_without_continual_fine_tuning_nothing_is_trained(suite, tmp_path, call):
    """The suite says how, but a user does not want it."""
    copy = tmp_path / "suite"
    shutil.copytree(suite, copy)
    described = json.loads((copy / "suite.json").read_text())
    (copy / "suite.json").write_text(json.dumps(described | {"training": {"steps": 3, "batch": 8}}))
    how = ("--table", "ode-m-1", "--rules", "average", "--tasks", 2, "--orders", 1, "--out", tmp_path / "out")
    rows = call("bench", copy, *how, "--no-continual", "--json").json()["tables"][0]["rows"]
    assert [row["2 tasks"] for row in rows if row["rule"] == "continually fine-tuned"] == [None, None]
    assert not list((tmp_path / "out" / "kept").glob("continual-*"))


def test_options_of_a_rule():
    assert with_option("ode", "step", 0.05) == "ode"
    assert with_option("ode", "step", 0.1) == "ode:step=0.1"
    assert with_option("ode:guidance=0.24", "step", 0.1) == "ode:step=0.1:guidance=0.24"


def test_lengths():
    assert default_lengths(20) == [8, 14, 20]
    assert default_lengths(8) == [4, 6, 8]
    assert default_lengths(3) == [2, 3]
    assert default_lengths(1) == [1]


def test_another_protocol_is_not_mixed_in(study):
    written_study.keep(study, "sweep-ants-bees", {"rule": "ode", "samples": 99}, [])
    with pytest.raises(OptionError, match="another protocol; choose another directory"):
        study.kept("sweep-ants-bees", {"rule": "ode", "samples": 12}, list)
