"""One step of a trunk under way: state, model and record are staged together, and committed together or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mergeway.calibration.memory import CalibrationMemory
from mergeway.checkpoint import Checkpoint, ModelWriter, SafetensorsFiles
from mergeway.checkpoint.heads import Head, write_heads
from mergeway.checkpoint.inspect import combine_digests
from mergeway.checkpoint.writer import FileWriter, Sink
from mergeway.core.tensors import TensorInfo
from mergeway.fold.prepare import Base
from mergeway.rules.rule import Fold, Rule
from mergeway.trunk.journal import Point, Record
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

    def keep_memory(self, memory: CalibrationMemory | None) -> None:
        """The calibration samples of the tasks."""
        if memory is not None:
            self.files |= memory.write(self.stage)

    def keep_rest_of(self, record: Record) -> None:
        """Everything but state and model as it is in an earlier snapshot."""
        self.files |= self.store.link_snapshot(record, self.stage, lambda n: not n.startswith("model") and n != STATE)

    def finish(self, record: Record, rule: Rule, at: Fold, details: Mapping[str, object], keep: int) -> Record:
        """Make the step part of the trunk; `keep` snapshots stay."""
        self._state.read()
        written = self._model.finish()
        tensors = {name: digest for file in written.values() for name, digest in file.items() if name}
        complete = replace(
            record,
            result=combine_digests(tensors, self.base.checkpoint.infos),
            stream=asdict(at),
            details={"rule": rule.name, "facts": dict(at.facts), **details},
        )
        digests = {STATE: self._state.digests} | self.files | written
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
