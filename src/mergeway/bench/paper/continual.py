"""The row of continual fine-tuning: one model tuned on task after task, in the same orders as the rules fold their experts."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from mergeway.bench.paper.pipeline import settings_of
from mergeway.bench.paper.study import Study
from mergeway.bench.protocol import orders
from mergeway.train import finetune


def continual_streams(study: Study, length: int) -> list[tuple[tuple[str, ...], np.ndarray]] | None:
    """Each order of the first `length` tasks with its accuracy matrix; None where nothing says how to train, or nobody wants it."""
    if not study.tunes or "training" not in study.suite.settings:
        return None
    tasks = [t.name for t in study.suite.tasks[:length]]
    return [
        (order, _as_matrix(_kept(study, order, number))) for number, order in enumerate(orders(tasks, study.orders))
    ]


def _kept(study: Study, order: tuple[str, ...], seed: int) -> list[list[float]]:
    training, _ = settings_of(study.suite, seed)

    def tune() -> list[list[float]]:
        params, rows = None, []
        study.progress.begin(f"tuning order {seed + 1} of {study.orders}", len(order), "tasks")
        for k, task in enumerate(order, 1):
            params = finetune(study.suite, task, None, training, start=params).params
            rows.append(study.suite.accuracies(params, order[:k], order[:k]))
            study.progress.advance(1)
        return rows

    protocol = {"order": list(order), "training": asdict(training), "tests": study.suite.tests}
    return study.kept(f"continual-{len(order)}-{seed}", protocol, tune)


def _as_matrix(rows: list[list[float]]) -> np.ndarray:
    """a[k, i], NaN above the diagonal."""
    matrix = np.full((len(rows), len(rows)), np.nan)
    for k, row in enumerate(rows):
        matrix[k, : k + 1] = row
    return matrix
