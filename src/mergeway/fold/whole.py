"""The fold of a `ModelRule`: the whole model at once, each rank with its rows of it or with all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.calibration.sharded_objective import ShardedObjective
from mergeway.calibration.split_objective import SplitObjective
from mergeway.checkpoint.writer import Sink
from mergeway.core.pool import keeping_freed_blocks
from mergeway.core.ranks import cut, offset
from mergeway.core.tensors import TensorInfo, wide
from mergeway.fold.folder import Asks, Folder, Standing, Target, slot_name
from mergeway.fold.prepare import Arrival
from mergeway.rules.rule import ByRows, Fold, Incoming, ModelRule


@dataclass(frozen=True)
class ReadAnew(Mapping[str, Tensor]):
    """Named tensors that are read whenever one is asked for, so that a rule holds in memory only what it keeps."""

    names: Sequence[str]
    one: Callable[[str], Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.one(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class ModelFolder(Folder):
    """One arrival at a time, with an objective."""

    rule: ModelRule

    @property
    def asks(self) -> Asks:
        return "tasks"

    def shared(self, objective: Objective) -> Objective:
        if self.team.count == 1:
            return objective
        return (ShardedObjective if self._in_rows else SplitObjective)(objective, self.team)

    def held(self, tensor: Tensor) -> Tensor:
        return cut(tensor, self.team) if self._in_rows else tensor

    def fold(
        self, arrivals: Sequence[Arrival], standing: Standing, objective: Objective | None, to: Target
    ) -> tuple[Fold, Mapping[str, object]]:
        [arrival] = arrivals
        assert objective is not None
        objective = self.shared(objective)
        at = standing.at.next(arrival.weight)
        state = standing.state
        held = {slot: self._lent(state.read, slot) for slot in self.rule.slots} if state else {}
        base, target = self._lent(self.base.checkpoint.read), self._lent(arrival.read)
        self.progress.begin("merging", None, "passes")
        # Ranks that gather layers would be left with holes as large as the model.
        with keeping_freed_blocks() if self.team.count == 1 else nullcontext():
            merged = self.rule.merge(at, Incoming(base, held, target, objective, self.team, self.progress))
        at, details = at.settled(merged.facts), dict(merged.details)
        if to.state is not None:
            for slot, tensors in merged.state.items():
                for name, info in self.base.merged_infos.items():
                    self._write(to.state.sink, slot_name(slot, name), info, tensors[self.base.stored_as(name)])
        if to.model is not None:
            deployed = merged.deployed
            if finished := self.rule.finish(deployed, objective, self.team):
                deployed = finished[0]
                details |= finished[1]
            for name, info in self.base.merged_infos.items():
                self._write(to.model, name, info, self.rounded(name, deployed[self.base.stored_as(name)]))
        return at, details

    @property
    def _in_rows(self) -> bool:
        """Whether each rank holds its rows of the model; other rules need it whole."""
        return self.team.count > 1 and isinstance(self.rule, ByRows)

    def _lent(self, read: Callable[[str], Tensor], slot: str | None = None) -> ReadAnew:
        """A model, or a slot of the state, in the dtype of the arithmetic; of rows, this rank's own.

        A tied tensor comes once: under two names its gradient would be torn in two, and the names would part. Names come in
        alphabetical order, wherever the tensors are from: a loss that adds them up would round by the order.
        """

        def one(name: str) -> Tensor:
            tensor = self.held(read(slot_name(slot, name) if slot else name))
            return tensor.to(wide(self.base.merged_infos[name].dtype))

        return ReadAnew(sorted(n for n in self.base.merged_infos if self.base.stored_as(n) == n), one)

    def _write(self, sink: Sink, name: str, info: TensorInfo, tensor: Tensor) -> None:
        """What this rank has to write: its rows, or all of it if it is the lead."""
        if self._in_rows or self.team.lead:
            sink.write(name, offset(info.shape, self.team) if self._in_rows else 0, tensor)
