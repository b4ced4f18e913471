"""What the two kinds of fold have in common: the tensors of a state, and how tensors are rounded, changed and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.inspect import is_finite
from mergeway.checkpoint.writer import Sink
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import ALONE, Team
from mergeway.core.tensors import TensorInfo, wide
from mergeway.errors import CheckpointError, OptionError
from mergeway.fold.prepare import Arrival, Base
from mergeway.rules.rule import Fold, KeepsDeployed, Removable, Rule, WantsAnswers

CPU = torch.device("cpu")

# All tasks so far, the arrival alone, or none.
Asks = Literal["tasks", "arrival", "nothing"]


class Scratch(Protocol):
    """A place for a rule's new state: written through `sink`, then read, then dropped when a newer one has replaced it."""

    @property
    def sink(self) -> Sink: ...

    def read(self) -> Checkpoint: ...

    def drop(self) -> None: ...


@dataclass(frozen=True)
class Standing:
    """Where a stream stands: the last fold, the rule's state after it, and the weights of the arrivals so far."""

    at: Fold = field(default_factory=Fold)
    state: Checkpoint | None = None
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class Target:
    """Where the results of a fold go, each if it is wanted: the new state, and the deployed tensors."""

    state: Scratch | None = None
    model: Sink | None = None


@dataclass(frozen=True)
class Folder:
    """One rule on one base, and the workers that do the work."""

    rule: Rule
    base: Base
    pool: Executor
    progress: Progress = SILENT
    team: Team = ALONE
    # Where a rule that works part by part has its arithmetic done; the parts go there and come back.
    device: torch.device = CPU

    @property
    def takes_many(self) -> bool:
        """Whether several arrivals cost one walk over the model."""
        return False

    @property
    def reads_back(self) -> bool:
        """Whether the model can be worked out only when the state is complete."""
        return False

    @property
    def asks(self) -> Asks:
        """Whose samples the fold asks about."""
        return "nothing"

    def ask(self, objective: Objective | None, weights: Sequence[float], arrival: Arrival) -> Objective | None:
        """The objective with the arrival's answers, the last of those with these weights, where the rule needs them."""
        if objective is None or self.asks != "tasks":
            return objective
        always = isinstance(self.rule, WantsAnswers) and self.rule.asks_arrivals
        asking, names = self.shared(objective), self.base.merged_infos
        return asking.taught(weights, lambda: {n: self.held(arrival.read(n)) for n in names}, always)

    def shared(self, objective: Objective) -> Objective:
        """The objective with the work on it shared between the ranks."""
        return objective

    def held(self, tensor: Tensor) -> Tensor:
        """What this rank holds of a tensor."""
        return tensor

    def fold(
        self, arrivals: Sequence[Arrival], standing: Standing, objective: Objective | None, to: Target
    ) -> tuple[Fold, Mapping[str, object]]:
        """Fold arrivals in; says where the stream stands then, and what the rule reported."""
        raise NotImplementedError

    def check_removable(self) -> None:
        """Refuse to take an arrival out of a state that is not a sum."""
        if not isinstance(self.rule, Removable):
            raise OptionError(
                f"rule '{self.rule.name}' cannot take an arrival out again: its state is not a sum; use 'rollback'"
            )

    def unfold(self, arrival: Arrival, standing: Standing, kept: Scratch, model: Sink) -> Fold:
        """Take an arrival out of the state, and work the model out again."""
        raise NotImplementedError

    def state_infos(self) -> dict[str, TensorInfo]:
        """The tensors of the rule's state: one for each slot and merged parameter, at least float32."""
        return {
            slot_name(slot, name): TensorInfo(
                self.rule.slot_shape(slot, self.base.tied.get(name, name), info.shape), wide(info.dtype)
            )
            for slot in self.rule.slots
            for name, info in self.base.merged_infos.items()
        }

    def change(
        self, tensors: Mapping[str, Tensor], standing: Standing, deployed: Checkpoint, kept: Sink, model: Sink
    ) -> None:
        """Other values for some deployed tensors; the stream goes on from them if the state holds the deployed model."""
        assert standing.state is not None
        for name, info in self.base.merged_infos.items():
            now = tensors.get(name, deployed.read(name)).to(wide(info.dtype))
            held = {slot: standing.state.read(slot_name(slot, name)) for slot in self.rule.slots}
            if name in tensors and isinstance(self.rule, KeepsDeployed):
                held = self.rule.changed(held, self.base.checkpoint.read(name).to(now.dtype), now)
            for slot, tensor in held.items():
                kept.write(slot_name(slot, name), 0, tensor)
            model.write(name, 0, self.rounded(name, now))
        self.copy_buffers(model)

    def copy_buffers(self, model: Sink) -> None:
        """Integer and boolean buffers, and tensors that are no task's to change, as they are in the base."""
        if self.team.lead:
            for name in self.base.checkpoint.infos:
                if name not in self.base.merged_infos:
                    model.write(name, 0, self.base.checkpoint.read(name))

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """A deployed tensor in the base's dtype; one that does not fit is refused."""
        tensor = tensor.to(self.base.checkpoint.infos[name].dtype)
        if not is_finite(tensor):
            raise CheckpointError(
                f"the merged tensor '{name}' does not fit into {tensor.dtype}; lower the rule's scaling or use a wider base"
            )
        return tensor


def slot_name(slot: str, name: str) -> str:
    """What a slot of a parameter is called in a state file."""
    return f"{slot}/{name}"
