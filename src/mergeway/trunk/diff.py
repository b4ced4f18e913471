"""What lies between two steps: which tensors moved how far, and what became of the accuracies that the journal has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mergeway.checkpoint import Checkpoint
from mergeway.errors import MergewayError
from mergeway.trunk.journal import Record
from mergeway.trunk.view import Step, TrunkView


@dataclass(frozen=True)
class Moved:
    """One tensor: ‖B − A‖, the same as a share of ‖A‖, and the cosine of its two updates from the base."""

    name: str
    shape: tuple[int, ...]
    distance: float
    relative: float | None
    cosine: float | None


@dataclass(frozen=True)
class Difference:
    """Two steps: their tensors, the one that moved farthest first, the same of all together, accuracies by task."""

    first: int
    second: int
    tensors: list[Moved]
    whole: Moved
    accuracies: dict[str, tuple[float | None, float | None]]


def diff(trunk: TrunkView, first: Step, second: Step) -> Difference:
    """Compare the deployed models of two steps whose snapshots are kept; without the base there are no cosines."""
    a, b = trunk.record(first), trunk.record(second)
    before, after = trunk.deployed(a.step), trunk.deployed(b.step)
    try:
        base = trunk.deployed(0)
    except MergewayError:
        base = None
    rows: list[Moved] = []
    total = _Sums()
    for name, info in before.infos.items():
        if info.merges:
            sums = _sums(name, before, after, base)
            rows.append(sums.moved(name, info.shape))
            total = total.plus(sums)
    rows.sort(key=lambda row: -row.distance)
    return Difference(a.step, b.step, rows, total.moved("all", ()), _accuracies(a, b))


@dataclass(frozen=True)
class _Sums:
    """Squared lengths of B − A, A and the two updates, and the product of the updates; those of several tensors add up."""

    between: float = 0.0
    first: float = 0.0
    updates: tuple[float, float, float] | None = (0.0, 0.0, 0.0)

    def plus(self, other: _Sums) -> _Sums:
        known = None
        if self.updates is not None and other.updates is not None:
            a, b, ab = (x + y for x, y in zip(self.updates, other.updates, strict=True))
            known = (a, b, ab)
        return _Sums(self.between + other.between, self.first + other.first, known)

    def moved(self, name: str, shape: tuple[int, ...]) -> Moved:
        distance = self.between**0.5
        relative = distance / self.first**0.5 if self.first else None
        cosine = None
        if self.updates is not None and self.updates[0] and self.updates[1]:
            cosine = self.updates[2] / (self.updates[0] * self.updates[1]) ** 0.5
        return Moved(name, shape, distance, relative, cosine)


def _sums(name: str, before: Checkpoint, after: Checkpoint, base: Checkpoint | None) -> _Sums:
    a, b = before.read(name).double(), after.read(name).double()
    if base is None:
        return _Sums(_square(b - a), _square(a), None)
    start = base.read(name).double()
    first, second = a - start, b - start
    return _Sums(_square(b - a), _square(a), (_square(first), _square(second), float((first * second).sum())))


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum())


def _accuracies(a: Record, b: Record) -> dict[str, tuple[float | None, float | None]]:
    first, second = checked(a), checked(b)
    return {task: (first.get(task), second.get(task)) for task in {**first, **second}}


def checked(record: Record) -> dict[str, float]:
    """What each task was worth when the step was committed, as far as it was judged."""
    rows: list[Mapping[str, float]] = record.details.get("checks", [])
    return {str(row["task"]): float(row["after"]) for row in rows}


def judged_steps(records: Sequence[Record]) -> list[tuple[Record, dict[str, float]]]:
    """Every step whose model was judged, with what each task was worth; a rollback has what was found of where it went.

    The records may be the newest only: then a rollback to a step before them has nothing.
    """
    by_step = {record.step: record for record in records}
    found: list[tuple[Record, dict[str, float]]] = []
    for record in records:
        judged: Record | None = record
        while judged is not None and judged.kind == "rollback":
            judged = by_step.get(int(judged.details["to"]))
        if judged is not None and (scores := checked(judged)):
            found.append((record, scores))
    return found
