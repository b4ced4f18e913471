"""A trunk under the writer's lock, and the record of a change by an arrival."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from mergeway.calibration.calibrate import CalibrationRequest, calibrate, read_task
from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.calibration.objective import Objective
from mergeway.checkpoint.heads import Head
from mergeway.errors import OptionError, TrunkError
from mergeway.fold.folder import Folder, Standing
from mergeway.fold.prepare import Arrival, Base, Data
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

    def calibrated(
        self, arrival: Arrival, heads: Mapping[str, Head], request: CalibrationRequest, bounds: Bounds
    ) -> tuple[Objective | None, CalibrationMemory | None, Data | None]:
        """The loss of all tasks and what to keep of their samples; or, if the rule asks about the arrival alone, its data."""
        name, asks, base = self.folder.rule.name, self.folder.asks, self.base.checkpoint
        if request.copies is not None and (asks != "tasks" or request.objective is not None):
            raise OptionError(
                "--copies: no arrival is asked here; leave it out, or fold with data and a rule that needs it"
            )
        if asks == "tasks":
            tasks = {f.task: f.weight for f in self.point.held()} | {arrival.task: arrival.weight}
            held = CalibrationMemory.read(self.store.of(self.point.last).directory("calibration"))
            memory, loss = calibrate(name, base, tasks, heads, held or CalibrationMemory({}, bounds=bounds), request)
            return loss, memory, None
        if isinstance(request.data, Mapping) or isinstance(request.head, Mapping):
            raise OptionError(f"rule '{name}' takes data of the arrival alone; give --data DATA")
        if request.objective is not None or (request.data is not None and asks == "nothing"):
            raise OptionError(f"rule '{name}' uses no data; leave out --data and the objective")
        if request.data is None:
            return None, None, None
        own = heads.get(arrival.task)
        return None, None, partial(read_task, request.data, request.head, arrival.task, base, own, request.compute)


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
