"""A trunk under the writer's lock, and the record of a change by an arrival."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from mergeway.checkpoint.heads import Head
from mergeway.errors import TrunkError
from mergeway.fold.folder import Folder, Standing
from mergeway.fold.prepare import Arrival, Base
from mergeway.rules.rule import Fold
from mergeway.trunk.journal import Point, Record, now
from mergeway.trunk.store import Store


@dataclass(frozen=True)
class Change:
    """A trunk under the writer's lock."""

    store: Store
    point: Point
    base: Base
    folder: Folder
    pool: Executor
    heads: Mapping[str, Head]

    def standing(self) -> Standing:
        """Where the rule stands after the last record."""
        last = self.point.last
        if last.files is None:
            return Standing()
        return Standing(Fold(**last.stream), self.store.of(last).state(), self.point.weights)


def record_of(point: Point, kind: str, arrival: Arrival) -> Record:
    """The record of a change by this arrival, without its result."""
    return Record(
        step=point.last.step + 1,
        kind=kind,
        result="",
        time=now(),
        task=arrival.task,
        source=arrival.checkpoint.source,
        digest=arrival.seen.digest,
        weight=arrival.weight,
    )


def refuse_twice(arrival: Arrival, point: Point, again: bool) -> None:
    """Weights that the deployed model holds already are most often a slip."""
    folded = None if again else point.with_digest(arrival.seen.digest)
    if folded is not None:
        raise TrunkError(
            f"{arrival.checkpoint.source}: the same weights were folded in at step {folded.step} as '{folded.task}'; pass --again to count them once more"
        )
