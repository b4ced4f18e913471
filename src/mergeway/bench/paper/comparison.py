"""ODE-M Tables 1, 2 and 5: the rules beside each other, by accuracy, backward transfer and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mergeway.bench import Run
from mergeway.bench.metrics import acc, bwt
from mergeway.bench.outcome import RunRow
from mergeway.bench.paper.continual import continual_streams
from mergeway.bench.paper.published import as_published, note_of
from mergeway.bench.paper.study import Study
from mergeway.bench.paper.table import Entry, Table, Value, mark_best, over_orders
from mergeway.bench.protocol import parse_rule
from mergeway.rules import RULES


def accuracy_and_transfer(study: Study) -> Table:
    """ACC and BWT by rule and stream length."""
    tasks = [t.name for t in study.suite.tasks]
    rows: list[list[Entry]] = []
    for name, side in (("pre-trained", "base"), ("fine-tuned", "experts")):
        means = [Value(float(np.mean([study.ends[side][t] for t in tasks[:n]]))) for n in study.lengths]
        rows.append(["ACC", name, *means])
    tuned = [continual_streams(study, n) for n in study.lengths]
    for name, metric in (("ACC", acc), ("BWT", bwt)):
        cells = [over_orders([metric(matrix) for _, matrix in streams]) if streams else None for streams in tuned]
        rows.append([name, "continually fine-tuned", *cells])
    return _by_length(study, "uniform", "ode-m-1", "ACC and BWT by rule and stream length", rows)


def weighted(study: Study) -> Table:
    """Table 1 under random utilities, which every rule and both metrics are given; task arithmetic and TIES as App. D has them."""
    title = "Utility-weighted ACC and BWT by rule and stream length"
    note = "A draw of utilities for each order, normalised to sum 1, given to every rule and to both metrics."
    return _by_length(study, "random", "ode-m-2", title, [], note)


def _by_length(study: Study, utilities: str, name: str, title: str, rows: list[list[Entry]], note: str = "") -> Table:
    ran = [as_published(study.rules, n, utilities) for n in study.lengths]
    runs = [study.run(list(rules.values()), n, utilities) for rules, n in zip(ran, study.lengths, strict=True)]
    note = f"{note} {note_of(study.rules, study.lengths)}".strip()
    mark = "" if utilities == "uniform" else "_w"
    breaks = [len(rows)] if rows else []
    found = [{row["rule"]: _metrics(row) for row in run.rows()} for run in runs]
    for place, metric in enumerate(("ACC", "BWT")):
        block: list[list[Entry]] = [
            [metric + mark, shown, *(by[rules[shown]][place] for by, rules in zip(found, ran, strict=True))]
            for shown in ran[0]
        ]
        rows = [*rows, *mark_best(block)]
        breaks.append(len(rows))
    columns = ("metric", "rule", *(f"{n} tasks" for n in study.lengths))
    return Table(name, f"{title}, suite {study.suite.name}", columns, rows, _note(study, note), tuple(breaks[:-1]))


def all_metrics(study: Study) -> Table:
    """Every metric at the longest stream: what a run knows beyond the papers' two."""
    ran = as_published(study.rules, study.longest)
    found = {row["rule"]: row for row in study.run(list(ran.values())).rows()}
    rows: list[list[Entry]] = [[shown, *_metrics(found[rule])] for shown, rule in ran.items()]
    best = [[row[0], *cells] for row, cells in zip(rows, _best_metrics([r[1:] for r in rows]), strict=True)]
    title = f"ACC, BWT, forgetting, forward transfer and share of the gap closed, {study.longest} tasks of {study.suite.name}"
    columns = ("rule", "ACC", "BWT", "forgetting", "FWT", "gap closed")
    note = f"Forgetting is better the lower; all in percent. {note_of(study.rules, [study.longest])}".strip()
    return Table("metrics", title, columns, best, _note(study, note))


def _metrics(row: RunRow) -> list[Entry]:
    """ACC, BWT, forgetting, forward transfer where the run knows it, and the share of the gap closed."""
    pairs = (
        (row["acc"], row["acc_std"]),
        (row["bwt"], row["bwt_std"]),
        (row["forgetting"], row["forgetting_std"]),
        (row["fwt"], row["fwt_std"]),
        (row["gap"], row["gap_std"]),
    )
    return [None if mean is None else Value(mean, std) for mean, std in pairs]


def _best_metrics(rows: Sequence[Sequence[Entry]]) -> list[list[Entry]]:
    """Marked as elsewhere, but forgetting, which stands third, by the lowest."""

    def flipped(rows: Sequence[Sequence[Entry]]) -> list[list[Entry]]:
        return [
            [replace(c, mean=-c.mean) if i == 2 and isinstance(c, Value) else c for i, c in enumerate(row)]
            for row in rows
        ]

    return flipped(mark_best(flipped(rows)))


def cost(study: Study) -> Table:
    """The time and the gradients it takes to fold one arrival into what is deployed."""
    run = study.run(study.rules)
    rows: list[list[Entry]] = []
    for rule in study.rules:
        seconds, gradients = merge_costs(run, rule)
        rows.append([rule, over_orders(seconds, 2), over_orders(gradients), _needs(rule)])
    title = f"Time and gradient evaluations per merge, streams of {study.longest} tasks of {study.suite.name}"
    note = (
        f"Mean ± std over all merges of {study.orders_in_words}, the first arrival of a stream aside; "
        f"a gradient is over {study.samples} samples; seconds without judging, on one thread."
    )
    return Table("ode-m-5", title, ("rule", "seconds per merge", "gradients per merge", "needs"), rows, note)


def merge_costs(run: Run, rule: str) -> tuple[list[float], list[float]]:
    """Seconds and gradients of every merge but the first of a stream, which only takes its arrival over."""
    folds = [fold for cell, stream in run.finished() if cell.label == rule for fold in stream[1:]]
    return [f.seconds for f in folds], [f.facts.get("gradients", 0.0) for f in folds]


def _needs(rule: str) -> str:
    return ", ".join(sorted(RULES[parse_rule(rule)[0]].needs)) or "nothing"


def _note(study: Study, more: str = "") -> str:
    base = f"Mean ± std over {study.orders_in_words} of the tasks; {study.samples} calibration samples."
    return f"{base} {more}".strip()
