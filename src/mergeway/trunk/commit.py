"""A change of a trunk under way: made under the lock, staged with its state, model and record, committed whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from mergeway.calibration.calibrate import CalibrationRequest, calibrate, part_data, read_task
from mergeway.calibration.given import heads_by_task, is_by_task
from mergeway.calibration.memory import CALIBRATION, HOLDOUT, Bounds, CalibrationMemory
from mergeway.calibration.objective import Objective
from mergeway.checkpoint import Checkpoint, ModelWriter, SafetensorsFiles
from mergeway.checkpoint.heads import Head, write_heads
from mergeway.checkpoint.inspect import combine_digests
from mergeway.checkpoint.writer import FileWriter, Sink
from mergeway.core.tensors import TensorInfo
from mergeway.errors import OptionError, TrunkError
from mergeway.fold.folder import Folder, Standing
from mergeway.fold.prepare import Arrival, Base, Data, looks_first, prepare_arrival
from mergeway.model.compute import Compute
from mergeway.rules.registry import Description
from mergeway.rules.rule import Fold, WantsAnswers
from mergeway.trunk.journal import Point, Record, now
from mergeway.trunk.record import Places
from mergeway.trunk.snapshot import STATE, Digests
from mergeway.trunk.store import Store


@dataclass
class Commit:
    """Where the results of a fold go: into a stage, which becomes the snapshot of the next step."""

    store: Store
    point: Point
    base: Base
    stage: Path
    files: Digests = field(default_factory=dict[str, dict[str, str]])
    _digests: Digests | None = None

    every = False
    keeps = True

    @classmethod
    @contextlib.contextmanager
    def begin(cls, store: Store, point: Point, base: Base) -> Generator[Commit]:
        """A commit that is gone again unless it is finished."""
        with store.stage() as stage:
            yield cls(store, point, base, stage)

    def state(self, infos: Mapping[str, TensorInfo]) -> StagedState:
        self._state = StagedState(self.stage / STATE, infos)
        return self._state

    def model(self, infos: Mapping[str, TensorInfo]) -> Sink:
        self._model = ModelWriter(self.stage, infos)
        return self._model

    def keep_heads(self, heads: Mapping[str, Head]) -> None:
        """The tensors that tasks keep for themselves."""
        self.files |= write_heads(self.stage, heads)

    def keep_memory(self, memory: CalibrationMemory | None, name: str = CALIBRATION) -> None:
        """The calibration samples of the tasks, or those that are held out."""
        if memory is not None:
            self.files |= memory.write(self.stage, name)

    def keep_rest_of(self, record: Record) -> None:
        """Everything but state and model as it is in an earlier snapshot."""
        self.files |= self.store.of(record).link_into(self.stage, lambda n: not n.startswith("model") and n != STATE)

    def staged(self) -> Checkpoint:
        """The model as it would be deployed."""
        self._written()
        return SafetensorsFiles("the staged model", sorted(self.stage.glob("model*.safetensors")), self.stage)

    def _written(self) -> Digests:
        if self._digests is None:
            self._digests = self._model.finish()
        return self._digests

    def described(self, record: Record, rule: Description, at: Fold, details: Mapping[str, object]) -> Record:
        """The record with what came of the change; nothing is committed yet."""
        tensors = {name: digest for file in self._written().values() for name, digest in file.items() if name}
        return replace(
            record,
            result=combine_digests(tensors, self.base.checkpoint.infos),
            stream=asdict(at),
            details={
                "rule": rule.name,
                "origin": rule.origin,
                "facts": dict(at.facts),
                **record.details,
                **details,
            },
        )

    def finish(self, record: Record, rule: Description, at: Fold, details: Mapping[str, object], keep: int) -> Record:
        """Make the step part of the trunk; `keep` snapshots stay. To keep none is to commit nothing."""
        self._state.read()
        complete = self.described(record, rule, at, details)
        if not keep:
            return complete
        digests = {STATE: self._state.digests} | self.files | self._written()
        return self.store.commit(self.stage, digests, self.point, complete, keep)


class StagedState:
    """The state of the next step; finished when it is first read."""

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        self.sink = FileWriter(path, infos)
        self._read: Checkpoint | None = None

    def read(self) -> Checkpoint:
        if self._read is None:
            self.digests = self.sink.finish()
            self._read = SafetensorsFiles("state", [self.sink.path])
        return self._read

    def drop(self) -> None:
        """It belongs to the snapshot."""


@dataclass(frozen=True)
class Change:
    """A trunk under the writer's lock."""

    store: Store
    point: Point
    base: Base
    folder: Folder
    pool: Executor
    heads: Mapping[str, Head]

    def incoming(self, checkpoint: Checkpoint, weight: float, task: str, again: bool) -> Arrival:
        """An arrival that fits; if it is inspected before the fold, one that is held already is refused at once."""
        first = looks_first(self.folder.rule)
        arrival = prepare_arrival(self.base, checkpoint, weight, task, self.pool, self.folder.progress, first)
        if first:
            self.refuse_twice(arrival, again)
        return arrival

    def refuse_twice(self, arrival: Arrival, again: bool) -> None:
        """Weights that the deployed model holds already are most often a slip."""
        arrival.seen.complete(self.pool)
        folded = None if again else self.point.with_digest(arrival.seen.digest)
        if folded is not None:
            raise TrunkError(
                f"{arrival.checkpoint.source}: the same weights were folded in at step {folded.step} as '{folded.task}'; pass --again to count them once more"
            )

    def standing(self) -> Standing:
        """Where the rule stands after the last record."""
        last = self.point.last
        if last.files is None:
            return Standing()
        weights = tuple(f.weight for f in self.point.held) if self.folder.asks == "tasks" else ()
        return Standing(Fold(**last.stream), self.store.of(last).state(), weights)

    def calibrated(
        self, arrival: Arrival, heads: Mapping[str, Head], request: CalibrationRequest, bounds: Bounds
    ) -> tuple[Objective | None, CalibrationMemory | None, Data | None]:
        """The loss of all tasks and what to keep of their samples; or, if the rule asks about the arrival alone, its data."""
        name, asks, base = self.folder.rule.name, self.folder.asks, self.base.checkpoint
        if request.copies is not None and (asks != "tasks" or request.objective is not None):
            raise OptionError(
                "--copies: no arrival is asked here; leave it out, or fold with data and a rule that needs it"
            )

        def params() -> dict[str, Tensor]:
            return {n: arrival.read(n) for n in self.base.merged_infos}

        if asks == "tasks":
            rule, folded = self.folder.rule, self.point.held
            tasks = {f.task: f.weight for f in folded} | {arrival.task: arrival.weight}
            held = CalibrationMemory.read(self.store.of(self.point.last).directory("calibration"))
            held = held or CalibrationMemory({}, bounds=bounds)
            held.check_answers({f.task: f.digest for f in folded})
            writes = isinstance(rule, WantsAnswers) and rule.asks_arrivals
            request = replace(request, arrival=params, writes=writes)
            memory, loss = calibrate(name, base, tasks, heads, held, request)
            return loss, memory, None
        if is_by_task(request.data):
            raise OptionError(f"rule '{name}' takes data of the arrival alone; give --data DATA")
        if request.objective is not None or (request.data is not None and asks == "nothing"):
            raise OptionError(f"rule '{name}' uses no data; leave out --data and the objective")
        if request.data is None:
            return None, None, None
        own, file = heads.get(arrival.task), heads_by_task(request.head, arrival.task).get(arrival.task)
        given = (request.data, file, arrival.task, base, own, request.compute, params)
        return None, None, partial(read_task, *given)

    def deployed(self) -> Checkpoint:
        """The model after the last record."""
        last = self.point.last
        return self.base.checkpoint if last.files is None else self.store.of(last).model()

    def held_back(
        self,
        arrival: Arrival,
        heads: Mapping[str, Head],
        request: CalibrationRequest,
        share: float | None,
        bounds: Bounds,
    ) -> tuple[CalibrationMemory | None, CalibrationRequest]:
        """The samples that are never folded with, a share of the arrival's among them, and the request without those."""
        held = CalibrationMemory.read(self.store.of(self.point.last).directory(HOLDOUT), HOLDOUT)
        if share is not None:
            parted = part_data(arrival.task, self.base.checkpoint, heads.get(arrival.task), request, share, bounds.seed)
            held = (held or CalibrationMemory({}, bounds=bounds)).holding(parted.settings, parted.held)
            data = None if self.folder.asks == "nothing" else parted.data
            request = replace(request, data=data)
        if held is None:
            return None, request
        return held.shared_out([*(f.task for f in self.point.held), arrival.task]), request


def record_of(store: Store, point: Point, kind: str, arrival: Arrival) -> Record:
    """The record of a change by this arrival, without its result."""
    places = Places.of(arrival.checkpoint.source, store.path).on_disk()
    return Record(
        step=point.last.step + 1,
        kind=kind,
        result="",
        time=now(),
        task=arrival.task,
        source=arrival.checkpoint.source,
        digest=arrival.seen.digest,
        weight=arrival.weight,
        details={"places": places} if places else {},
    )


def notes_of(message: str | None, compute: Compute | None) -> dict[str, object]:
    """What a record says of how a change was made: the user's own words, and that a model's code was allowed to run."""
    allowed = compute is not None and compute.allow_code
    return {**({"message": message} if message else {}), **({"allow_code": True} if allowed else {})}
