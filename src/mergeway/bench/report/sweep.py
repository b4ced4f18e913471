"""The sweep behind the operating-point explorer: the last trajectory of a stream, judged on all tasks at several times."""

from __future__ import annotations

import json
from pathlib import Path

from mergeway.bench.protocol import Cell
from mergeway.bench.report.stored import SWEEP, Sweep
from mergeway.bench.run import Run
from mergeway.bench.suite import Suite
from mergeway.checkpoint import open_checkpoint
from mergeway.core.files import replace_text
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.fold.merge import fold_steps
from mergeway.rules import Ode, make

POINTS = 11


def record_sweep(suite: Suite, run: Run, out: Path, points: int = POINTS, progress: Progress = SILENT) -> Sweep:
    """Follow the trajectory toward the last arrival of the run's first, longest stream to its end, and keep what it shows.

    The deployed model before that arrival is that of `ode`, with the options it has in the run.
    """
    cell = _choose(suite, run)
    rule = make("ode", dict(cell.options) if cell.rule == "ode" else {})
    assert isinstance(rule, Ode)
    order, weights = list(cell.order), list(cell.weights)
    experts = [suite.task(name).expert for name in order]
    objective = suite.objective(order, size=cell.samples, seed=cell.number)
    *_, before = fold_steps(suite.base, experts[:-1], rule, weights[:-1], objective)
    target = open_checkpoint(experts[-1], open_checkpoint(suite.base))
    start = {n: before.params[n].float() for n, info in target.infos.items() if info.merges}
    times = [i / (points - 1) for i in range(points)]
    path = rule.path(start, {n: target.read(n).float() for n in start}, objective.seen(len(order), weights), 1.0, times)
    progress.begin(f"judging {points} operating times", points * len(order), "accuracies")
    accuracies: dict[str, list[float]] = {name: [] for name in order}
    for time in times:
        params = path.at(time)
        for name in order:
            accuracies[name].append(suite.accuracy(params, name))
            progress.advance(1)
    found: Sweep = {
        "suite": suite.name,
        "rule": cell.label if cell.rule == "ode" else "ode",
        "order": order,
        "weights": weights,
        "times": times,
        "accuracies": accuracies,
        "trajectory": path.summary(),
    }
    replace_text(out / SWEEP, json.dumps(found, indent=1) + "\n")
    return found


def _choose(suite: Suite, run: Run) -> Cell:
    """The first order of the longest stream, of `ode` when the run has it."""
    if suite.name != run.suite:
        raise OptionError(f"--suite {suite.path}: is suite '{suite.name}', but the run is on '{run.suite}'")
    most = max(len(cell.order) for cell in run.cells)
    if most < 2:
        raise OptionError("a sweep needs a stream of at least two tasks")
    longest = [cell for cell in run.cells if len(cell.order) == most]
    return min(longest, key=lambda cell: (cell.rule != "ode", cell.number))
