"""A stream of a benchmark: folded, judged after every fold, and kept on disk while it is under way."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mergeway.bench.protocol import Cell
from mergeway.bench.suite import Suite
from mergeway.checkpoint import Checkpoint, SafetensorsFiles
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.files import contents, make_directory, replace_text, replaced
from mergeway.fold.merge import FoldedModel, fold_steps
from mergeway.rules import Fold, make

KEEP_AFTER = 1.0  # seconds of work: what takes less is sooner repeated than written


@dataclass(frozen=True)
class FoldResult:
    """What one fold of a stream gave: the accuracies of all tasks seen so far, the rule's facts, and the time it took.

    `ahead` is the accuracy on the task that comes next, before it is folded in; None at the end of a stream. `losses` are the mean
    losses of the tasks seen so far; a run of an earlier version has none.
    """

    fold: int
    task: str
    accuracies: tuple[float, ...]
    facts: dict[str, float]
    details: dict[str, Any]
    seconds: float
    ahead: float | None = None
    losses: tuple[float, ...] = ()


def run_cell(suite: Suite, cell: Cell, underway: Underway | None = None) -> Iterator[FoldResult]:
    """Fold a stream and judge it after every fold; what was kept of it `underway` comes first and is not folded again."""
    rule = make(cell.rule, dict(cell.options))
    order = list(cell.order)
    objective = None
    if rule.needs:
        objective = suite.objective(
            order, size=cell.samples, seed=cell.number, copies=cell.copies, written=cell.written
        )
    arrivals = [suite.task(name).expert for name in cell.order]
    folds, after = underway.read() if underway else ([], None)
    yield from folds
    started = time.perf_counter()
    steps = fold_steps(suite.base, arrivals, rule, list(cell.weights), objective, compute=suite.compute, after=after)
    for k, step in enumerate(steps, len(folds) + 1):
        seconds = time.perf_counter() - started
        judged = suite.judge(step.params, cell.order[:k], seen=cell.order[:k])
        accuracies, losses = (tuple(figure[side] for figure in judged) for side in (0, 1))
        ahead = suite.accuracy(step.params, cell.order[k], cell.order[: k + 1]) if k < len(cell.order) else None
        facts, details = dict(step.at.facts), dict(step.details)
        folds.append(FoldResult(k, cell.order[k - 1], accuracies, facts, details, seconds, ahead, losses))
        if underway and k < len(cell.order):
            underway.keep(folds, step)
        yield folds[-1]
        started = time.perf_counter()


class Underway:
    """The folds of an unfinished stream and the rule's state after the last of them, in a directory of their own.

    The state of a fold is a file of its own, and the folds, which name it, are replaced in one go: a kill at any moment
    leaves a fold and its state.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._kept = time.perf_counter()

    def keep(self, folds: Sequence[FoldResult], step: FoldedModel) -> None:
        """Keep the stream as it stands, unless that was done a moment ago."""
        if time.perf_counter() - self._kept < KEEP_AFTER:
            return
        make_directory(self.directory)
        with replaced(self._state(step.at.step)) as new:
            save_tensors(new, {name: step.state.read(name) for name in step.state.infos})
        text = json.dumps({"at": asdict(step.at), "folds": [asdict(fold) for fold in folds]}) + "\n"
        replace_text(self.directory / "folds.json", text)
        for path in self.directory.glob("state-*.safetensors"):
            if path != self._state(step.at.step):
                path.unlink()
        self._kept = time.perf_counter()

    def read(self) -> tuple[list[FoldResult], tuple[Fold, Checkpoint] | None]:
        """The folds that were kept, and where the stream goes on."""
        path = self.directory / "folds.json"
        if not path.exists():
            return [], None
        kept = json.loads(contents(path))
        at = Fold(**kept["at"])
        folds = [fold_of(fold) for fold in kept["folds"]]
        return folds, (at, SafetensorsFiles("state", [self._state(at.step)]))

    def drop(self) -> None:
        """Forget a stream that is finished."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _state(self, step: int) -> Path:
        return self.directory / f"state-{step}.safetensors"


def fold_of(kept: dict[str, Any]) -> FoldResult:
    """A fold as it was written to a file."""
    return FoldResult(**{**kept, "accuracies": tuple(kept["accuracies"]), "losses": tuple(kept.get("losses", ()))})


def matrix_of(folds: Sequence[FoldResult], ahead: bool = False) -> np.ndarray:
    """The accuracy matrix a[k, i] of a stream; entries above the diagonal are NaN, but with `ahead` those next to it."""
    matrix = np.full((len(folds), len(folds)), np.nan)
    for fold in folds:
        matrix[fold.fold - 1, : fold.fold] = fold.accuracies
        if ahead and fold.ahead is not None:
            matrix[fold.fold - 1, fold.fold] = fold.ahead
    return matrix
