"""The protocol: which rule folds which tasks in which order, and the accuracy matrix that comes of it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergeway.errors import OptionError
from mergeway.merging import fold_steps
from mergeway.rules import make
from mergeway.suite import Suite


@dataclass(frozen=True)
class Cell:
    """One stream: a rule with its options, an order of tasks, their utilities, and the calibration seed."""

    rule: str
    options: tuple[tuple[str, Any], ...]
    label: str
    order: tuple[str, ...]
    weights: tuple[float, ...]
    number: int
    samples: int

    @property
    def key(self) -> str:
        """A name for files: label, stream length, order number."""
        return f"{self.label}.{len(self.order)}.{self.number}"


def orders(tasks: Sequence[str], count: int, seed: int = 0) -> list[tuple[str, ...]]:
    """`count` seeded shufflings of the tasks, the same for every rule."""
    made = []
    for number in range(count):
        order = list(tasks)
        random.Random(1000 * seed + number).shuffle(order)  # noqa: S311 - an order, not a secret
        made.append(tuple(order))
    return made


def utilities(count: int, number: int, kind: str, seed: int = 0) -> tuple[float, ...]:
    """Uniform weights, or a random draw from (0, 1) normalised to sum 1 (Section 4.3, ODE-M)."""
    if kind == "uniform":
        return (1.0,) * count
    drawn = np.random.default_rng(10_000 + 1000 * seed + number).uniform(0.05, 1.0, count)
    return tuple(float(w) for w in drawn / drawn.sum())


def parse_rule(text: str) -> tuple[str, dict[str, Any], str]:
    """A rule as written on the command line, `name` or `name:key=value:key=value`: its name, options and label."""
    name, *pairs = text.split(":")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise OptionError(f"rule '{text}': expected name:key=value, such as iso:scaling=1.5")
        options[key] = value
    chosen = make(name, options)
    return name, chosen.options() if options else {}, text


def plan(
    suite: Suite, rules: Sequence[str], lengths: Sequence[int], count: int, kind: str, samples: int, seed: int = 0
) -> list[Cell]:
    """Every stream of a benchmark."""
    tasks = [t.name for t in suite.tasks]
    cells = []
    for text in rules:
        name, options, label = parse_rule(text)
        for length in lengths:
            for number, order in enumerate(orders(tasks[:length], count, seed)):
                weights = utilities(length, number, kind, seed)
                cells.append(Cell(name, tuple(options.items()), label, order, weights, number, samples))
    return cells


@dataclass(frozen=True)
class FoldResult:
    """What one fold of a stream gave: the accuracies of all tasks seen so far, the rule's facts, and the time it took.

    `ahead` is the accuracy on the task that comes next, before it is folded in; None at the end of a stream.
    """

    fold: int
    task: str
    accuracies: tuple[float, ...]
    facts: dict[str, float]
    details: dict[str, Any]
    seconds: float
    ahead: float | None = None


def run_cell(suite: Suite, cell: Cell) -> Iterator[FoldResult]:
    """Fold a stream and judge it after every fold."""
    rule = make(cell.rule, dict(cell.options))
    objective = suite.objective(list(cell.order), size=cell.samples, seed=cell.number) if rule.needs else None
    arrivals = [suite.task(name).expert for name in cell.order]
    started = time.perf_counter()
    for k, step in enumerate(fold_steps(suite.base, arrivals, rule, list(cell.weights), objective), 1):
        seconds = time.perf_counter() - started
        accuracies = tuple(suite.accuracies(step.params, cell.order[:k], seen=cell.order[:k]))
        ahead = suite.accuracy(step.params, cell.order[k], cell.order[: k + 1]) if k < len(cell.order) else None
        yield FoldResult(k, cell.order[k - 1], accuracies, dict(step.at.facts), step.details, seconds, ahead)
        started = time.perf_counter()


def matrix_of(folds: Sequence[FoldResult], ahead: bool = False) -> np.ndarray:
    """The accuracy matrix a[k, i] of a stream; entries above the diagonal are NaN, but with `ahead` those next to it."""
    matrix = np.full((len(folds), len(folds)), np.nan)
    for fold in folds:
        matrix[fold.fold - 1, : fold.fold] = fold.accuracies
        if ahead and fold.ahead is not None:
            matrix[fold.fold - 1, fold.fold] = fold.ahead
    return matrix
