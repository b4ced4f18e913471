"""Certificates over whole streams: how many folds kept their envelope, barriers against their bound, and which task lost most.

ODE-M's theorem is about the mean loss of one fold. What a stream of certified folds does to its first tasks, only their losses
after every fold can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from mergeway.bench.protocol import Cell
from mergeway.bench.run import Run
from mergeway.bench.stream import FoldResult

ROUNDING = 1e-6  # of a loss in float32
Stream = tuple[Cell, list[FoldResult]]


class StreamRow(TypedDict):
    """The folds of a rule that followed a path, over all streams of one length.

    `within` counts the barriers (Eq. 6) below their bound (Eq. 17), `kept` the folds that left every earlier task within the budget
    of `certify`; `rise` is the most that a task's test loss ended above what it was when the task was folded in, `worst` that task.
    """

    rule: str
    tasks: int
    streams: int
    folds: int
    certified: int
    within: int
    barrier: float
    gamma: float
    kept: int | None
    worst: str | None
    rise: float | None


def stream_rows(run: Run) -> list[StreamRow]:
    """A row for each rule and stream length with a path to certify."""
    groups: dict[tuple[str, int], list[Stream]] = {}
    for cell, folds in run.finished():
        if any("trajectory" in fold.details for fold in folds):
            groups.setdefault((cell.label, len(cell.order)), []).append((cell, folds))
    return [_row(label, length, group) for (label, length), group in groups.items()]


def _row(label: str, length: int, group: Sequence[Stream]) -> StreamRow:
    followed = [fold.details for _, folds in group for fold in folds if "trajectory" in fold.details]
    paths: list[dict[str, Any]] = [details["trajectory"] for details in followed]
    audits = [details["stream"] for details in followed if "stream" in details]
    rises = [pair for cell, folds in group for pair in rises_of(cell.order, folds)]
    worst, rise = max(rises, key=lambda pair: pair[1], default=(None, None))
    return {
        "rule": label,
        "tasks": length,
        "streams": len(group),
        "folds": len(paths),
        "certified": sum(bool(path["certified"]) for path in paths),
        "within": sum(path["barrier"] <= path["bound"] + ROUNDING for path in paths),
        "barrier": max(path["barrier"] for path in paths),
        "gamma": min(min(path["gammas"], default=1.0) for path in paths),
        "kept": sum(bool(audit["certified"]) for audit in audits) if audits else None,
        "worst": worst,
        "rise": rise,
    }


def rises_of(order: Sequence[str], folds: Sequence[FoldResult]) -> Iterable[tuple[str, float]]:
    """Each task but the last, with its test loss at the end less that behind its own fold; none in a run of an earlier version."""
    if not all(fold.losses for fold in folds):
        return ()
    last = folds[-1].losses
    return [(task, last[k] - folds[k].losses[k]) for k, task in enumerate(order[:-1])]
