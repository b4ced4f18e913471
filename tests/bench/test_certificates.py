"""Certificates over streams, from folds that are written by hand."""

from __future__ import annotations

import pytest

from mergeway.bench import Run
from mergeway.bench.certificates import stream_rows
from mergeway.bench.protocol import Cell
from mergeway.bench.stream import FoldResult

ORDER = ("ants", "bees", "cats")


def cell(rule, number=0):
    return Cell(rule, (), rule, ORDER, (1.0,) * 3, number, 12)


def folds(losses, paths=None, kept=None):
    """A stream's folds; `paths` are (certified, barrier, bound, γ) of the second and the third."""
    made = []
    for k, row in enumerate(losses, 1):
        details = {}
        if k > 1 and paths:
            certified, barrier, bound, gamma = paths[k - 2]
            details["trajectory"] = {"certified": certified, "barrier": barrier, "bound": bound, "gammas": [1.0, gamma]}
        if k > 1 and kept:
            details["stream"] = {"certified": kept[k - 2]}
        made.append(FoldResult(k, ORDER[k - 1], (50.0,) * k, {}, details, 1.0, None, tuple(row)))
    return made


def run(streams):
    ends = dict.fromkeys(ORDER, 50.0)
    described = {"suite": "t", "rules": [], "lengths": [3], "orders": 2, "utilities": "uniform", "samples": 12}
    cells = [c for c, _ in streams]
    return Run("t", described | {"version": "0"}, ends, ends, {c.key: f for c, f in streams}, cells)


def test_by_hand():
    """Four folds: three certified, two barriers under their bound; bees rose most, from 0.3 to 0.9 in the second order."""
    first = folds([[0.1], [0.2, 0.3], [0.4, 0.5, 0.1]], [(True, 0.0, 0.2, 1.0), (True, 0.3, 0.2, 0.4)], [True, False])
    second = folds([[0.1], [0.2, 0.3], [0.2, 0.9, 0.1]], [(False, 0.1, 0.0, 0.0), (True, 0.0, 0.0, 1.0)], [True, True])
    plain = folds([[0.1], [0.2, 0.3], [0.4, 0.5, 0.1]])
    rows = stream_rows(run([(cell("ode", 0), first), (cell("ode", 1), second), (cell("average"), plain)]))
    assert rows == [
        {
            "rule": "ode",
            "tasks": 3,
            "streams": 2,
            "folds": 4,
            "certified": 3,
            "within": 2,
            "barrier": 0.3,
            "gamma": 0.0,
            "kept": 3,
            "worst": "bees",
            "rise": pytest.approx(0.6),
        }
    ]


def test_what_was_not_measured_is_not_said():
    made = folds([[], [], []], [(True, 0.0, 0.2, 1.0), (True, 0.0, 0.2, 1.0)])
    (row,) = stream_rows(run([(cell("ode"), made)]))
    assert (row["kept"], row["worst"], row["rise"]) == (None, None, None)
