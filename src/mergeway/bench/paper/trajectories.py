"""ODE-M Tables 6 and 7: accuracy along trajectories between two experts, and where the best operating time lies.

Deviates: Table 7 finds the best time by accuracy on test data, for suites have no validation data; nothing is deployed by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergeway.bench.paper.study import Study
from mergeway.bench.paper.table import Entry, Table, Value, mark_best, over_orders
from mergeway.bench.protocol import orders, parse_rule
from mergeway.bench.sweep import SweepPoint, sweep
from mergeway.checkpoint import open_checkpoint
from mergeway.fold.merge import fold_steps
from mergeway.rules import Ode, make

PAIRS, POINTS = 5, 11
TIMES = [i / 20 for i in range(21)]


def two_task_sweeps(study: Study) -> Table:
    """Accuracy of two tasks, and their mean, along the trajectory from one expert to the other."""
    rows: list[list[Entry]] = []
    breaks = []
    for start, target in pairs_of([t.name for t in study.suite.tasks], PAIRS):
        points = _sweep(study, start, target)
        first, second = ([p["accuracies"][task] for p in points] for task in (start, target))
        means = mark_best([[Value((a + b) / 2)] for a, b in zip(first, second, strict=True)])
        pair = f"{start} → {target}"
        breaks.append(len(rows))
        rows.append([pair, start, *map(Value, first)])
        rows.append([pair, target, *map(Value, second)])
        rows.append([pair, "mean", *(cell for (cell,) in means)])
    columns = ("pair", "task", *(f"{i / (POINTS - 1):.1f}" for i in range(POINTS)))
    title = f"Accuracy along the trajectory of {study.ode} between two experts of {study.suite.name}, by operating time"
    note = f"{study.samples} calibration samples; the best mean of each pair is bold."
    return Table("ode-m-6", title, columns, rows, note, tuple(breaks[1:]))


def pairs_of(tasks: Sequence[str], count: int) -> list[tuple[str, str]]:
    """The first two tasks of each seeded order, without repetition."""
    found: list[tuple[str, str]] = []
    for order in orders(tasks, 20 * count) if len(tasks) > 1 else ():
        if order[:2] not in found and len(found) < count:
            found.append((order[0], order[1]))
    return found


def _sweep(study: Study, start: str, target: str) -> list[SweepPoint]:
    first, second = (str(study.suite.task(name).expert) for name in (start, target))
    options = parse_rule(study.ode)[1]
    return study.kept(
        f"sweep-{start}-{target}",
        {"rule": study.ode, "samples": study.samples},
        lambda: sweep(first, second, study.suite, None, POINTS, options, study.samples),
    )


def time_schedule(study: Study) -> Table:
    """The rank correlation of 1 − t⋆ with (k − 1)/k, t⋆ being the best operating time of merge k."""
    correlations: list[Entry] = []
    offsets: list[Entry] = []
    for length in study.lengths:
        streams = [best_times(study, length, number) for number in range(study.orders)]
        kept = [(k - 1) / k for k in range(2, length + 1)]
        found = [spearman([1 - t for t in stream], kept) for stream in streams]
        known = [value for value in found if value is not None]
        correlations.append(over_orders(known, 3) if known else None)
        apart = [t - 1 / k for stream in streams for k, t in enumerate(stream, 2)]
        offsets.append(over_orders(apart, 3) if apart else None)
    columns = ("", *(f"{n} tasks" for n in study.lengths))
    rows = [["Spearman of 1 − t⋆ with (k − 1)/k", *correlations], ["t⋆ − 1/k", *offsets]]
    title = f"Where the best operating time lies, {study.ode} on {study.suite.name}"
    note = (
        f"t⋆: the time in steps of 0.05 with the highest mean accuracy on the tasks seen, judged on test data; "
        f"mean ± std over {study.orders_in_words} (second row: over all merges); {study.samples} calibration samples."
    )
    return Table("ode-m-7", title, columns, rows, note)


def best_times(study: Study, length: int, number: int) -> list[float]:
    """t⋆ of every merge from the second on; of equally good times the earliest, which keeps the most."""
    seen = study.kept(
        f"schedule-{length}-{number}",
        {"rule": study.ode, "samples": study.samples, "times": TIMES},
        lambda: _accuracies_by_time(study, length, number),
    )
    return [TIMES[int(np.argmax(accuracies))] for accuracies in seen]


def _accuracies_by_time(study: Study, length: int, number: int) -> list[list[float]]:
    """For every merge of a stream, the mean accuracy on the tasks seen at each time of the trajectory followed to its end.

    The stream itself goes on from where the rule stops.
    """
    suite = study.suite
    rule = make("ode", parse_rule(study.ode)[1])
    assert isinstance(rule, Ode)
    order = list(orders([t.name for t in suite.tasks[:length]], number + 1)[number])
    objective = suite.objective(order, size=study.samples, seed=number)
    steps = fold_steps(suite.base, [suite.task(n).expert for n in order], rule, None, objective)
    study.progress.begin(f"judging operating times, {length} tasks, order {number + 1}", length - 1, "merges")
    rows = []
    for k, (task, before) in enumerate(zip(order[1:], steps, strict=False), 2):
        target = open_checkpoint(suite.task(task).expert, open_checkpoint(suite.base))
        start = {n: before.params[n].float() for n, info in target.infos.items() if info.merges}
        path = rule.path(start, {n: target.read(n).float() for n in start}, objective.seen(k, [1.0] * k), 1.0, TIMES)
        seen = order[:k]
        rows.append([float(np.mean(suite.accuracies(path.at(t), seen, seen))) for t in TIMES])
        study.progress.advance(1)
    return rows


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None where one side never changes."""
    if len(first) < 2:
        return None
    ranks = np.array([_ranks(np.asarray(side, dtype=np.float64)) for side in (first, second)])
    if (np.ptp(ranks, axis=1) == 0).any():
        return None
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    return np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values])
