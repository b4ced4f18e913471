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
from mergeway.trunk.journal import Folded, Journal, Record, now
from mergeway.trunk.store import Store


@dataclass(frozen=True)
class Change:
    """A trunk under the writer's lock."""

    store: Store
    journal: Journal
    base: Base
    folder: Folder
    pool: Executor
    heads: Mapping[str, Head]

    def standing(self) -> Standing:
        """Where the rule stands after the last record."""
        last = self.journal.last
        if last.files is None:
            return Standing()
        weights = tuple(f.weight for f in self.journal.folded())
        return Standing(Fold(**last.stream), self.store.of(last).state(), weights)


def record_of(journal: Journal, kind: str, arrival: Arrival) -> Record:
    """The record of a change by this arrival, without its result."""
    return Record(
        step=len(journal.records),
        kind=kind,
        result="",
        time=now(),
        task=arrival.task,
        source=arrival.checkpoint.source,
        digest=arrival.seen.digest,
        weight=arrival.weight,
    )


def refuse_twice(arrival: Arrival, held: list[Folded], again: bool) -> None:
    """Weights that the deployed model holds already are most often a slip."""
    for folded in held:
        if folded.digest == arrival.seen.digest and not again:
            raise TrunkError(
                f"{arrival.checkpoint.source}: the same weights were folded in at step {folded.step} as '{folded.task}'; pass --again to count them once more"
            )
