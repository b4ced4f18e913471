"""ODE-M Tables 3 and 4: how accuracy depends on the number of calibration samples and on the step size."""

from __future__ import annotations

from mergeway.bench.paper.study import Study, with_option
from mergeway.bench.paper.table import Entry, Table, Value, mark_best
from mergeway.bench.protocol import parse_rule
from mergeway.rules import RULES

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2)


def calibration_size(study: Study) -> Table:
    """ACC of every rule that needs samples, by how many it has."""
    rules = [r for r in study.rules if "calibration" in RULES[parse_rule(r)[0]].needs] or [study.ode]
    rows: list[list[Entry]] = []
    for rule in rules:
        # Each task needs at least one sample.
        found = [study.run([rule], samples=n).rows()[0] if n >= study.longest else None for n in SIZES]
        rows.append([rule, *(Value(row["acc"], row["acc_std"]) if row else None for row in found)])
    available = sum(len(study.suite.samples(t.name, "train")) for t in study.suite.tasks[: study.longest])
    title = f"ACC by the number of calibration samples, streams of {study.longest} tasks of {study.suite.name}"
    note = f"Mean ± std over {study.orders_in_words}; {available} training examples to draw from."
    return Table("ode-m-3", title, ("rule", *map(str, SIZES)), rows, note)


def step_size(study: Study) -> Table:
    """ACC and gradients of `ode` by the step size of the solver."""
    rows: list[list[Entry]] = []
    for step in STEPS:
        row = study.run([with_option(study.ode, "step", step)]).rows()[0]
        cells = mark_best([[Value(row["acc"], row["acc_std"], 2), Value(row["bwt"], row["bwt_std"], 2)]])[0]
        rows.append([f"{step:g}", *cells, Value(row["gradients"])])
    marked = mark_best([row[1:2] for row in rows])
    rows = [[row[0], *best, *row[2:]] for row, best in zip(rows, marked, strict=True)]
    title = f"ACC of {study.ode} by step size, streams of {study.longest} tasks of {study.suite.name}"
    note = f"Mean ± std over {study.orders_in_words}; {study.samples} calibration samples; solver euler unless the rule says otherwise."
    return Table("ode-m-4", title, ("step", "ACC", "BWT", "gradients per stream"), rows, note)
