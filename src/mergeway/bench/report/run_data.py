"""What the page of a run shows, as plain numbers; the page draws them and works out nothing but the explorer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mergeway.bench.certificates import stream_rows
from mergeway.bench.metrics import acc, bwt
from mergeway.bench.protocol import Cell
from mergeway.bench.report.stored import Sweep
from mergeway.bench.run import Run
from mergeway.bench.stream import FoldResult, matrix_of

Stream = tuple[Cell, list[FoldResult]]


def run_data(run: Run, sweep: Sweep | None = None) -> dict[str, object]:
    """The numbers of a run for its page."""
    done = run.finished()
    return {
        "kind": "run",
        "title": run.suite,
        "description": run.description,
        "tasks": list(run.base),
        "base": run.base,
        "experts": run.experts,
        "ends": _ends(run, done),
        "headline": run.as_json(),
        "streams": [_stream_data(cell, folds) for cell, folds in done],
        "courses": _courses(done),
        "trajectories": [path for cell, folds in done for path in _trajectories(cell, folds)],
        "certificates": stream_rows(run),
        "sweep": sweep,
    }


def _ends(run: Run, done: Sequence[Stream]) -> dict[str, float]:
    """Mean accuracy of base and experts on the tasks of the longest streams, which the first rows of the table are about."""
    longest = max((cell.order for cell, _ in done), key=len)
    return {
        "base": float(np.mean([run.base[task] for task in longest])),
        "experts": float(np.mean([run.experts[task] for task in longest])),
    }


def _stream_data(cell: Cell, folds: Sequence[FoldResult]) -> dict[str, object]:
    return {
        "rule": cell.label,
        "number": cell.number,
        "order": list(cell.order),
        "weights": list(cell.weights),
        "matrix": [list(fold.accuracies) for fold in folds],
        "gradients": [fold.facts.get("gradients", 0) for fold in folds],
        "seconds": [fold.seconds for fold in folds],
    }


def _courses(done: Sequence[Stream]) -> list[dict[str, object]]:
    """ACC and BWT after every fold, mean and standard deviation over the orders, for each rule and stream length."""
    groups: dict[tuple[str, int], list[Stream]] = {}
    for cell, folds in done:
        groups.setdefault((cell.label, len(cell.order)), []).append((cell, folds))
    courses: list[dict[str, object]] = []
    for (label, length), group in groups.items():
        accs, bwts = [], []
        for cell, folds in group:
            matrix = matrix_of(folds)
            heads = [(matrix[:k, :k], cell.weights[:k]) for k in range(1, length + 1)]
            accs.append([acc(m, w) for m, w in heads])
            bwts.append([bwt(m, w) for m, w in heads])
        ends = {task: _last(group, task) for task in group[0][0].order}
        courses.append(
            {
                "rule": label,
                "length": length,
                "orders": len(group),
                "acc": np.mean(accs, 0).tolist(),
                "acc_std": np.std(accs, 0).tolist(),
                "bwt": np.mean(bwts, 0).tolist(),
                "bwt_std": np.std(bwts, 0).tolist(),
                "by_task": {task: float(np.mean(values)) for task, values in ends.items()},
                "by_task_std": {task: float(np.std(values)) for task, values in ends.items()},
            }
        )
    return courses


def _last(group: Sequence[Stream], task: str) -> list[float]:
    return [folds[-1].accuracies[cell.order.index(task)] for cell, folds in group]


def _trajectories(cell: Cell, folds: Sequence[FoldResult]) -> list[dict[str, object]]:
    return [
        {"rule": cell.label, "number": cell.number, "length": len(cell.order), "fold": fold.fold, "task": fold.task}
        | fold.details["trajectory"]
        for fold in folds
        if "trajectory" in fold.details
    ]
