"""The one loop over arrivals. `merge`, `bench` and a trunk's `add` call it; they differ in where state and model go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import torch

from mergeway.calibration.objective import Objective
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.writer import Sink
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import ALONE, Team
from mergeway.core.tensors import TensorInfo
from mergeway.errors import OptionError
from mergeway.fold.folder import CPU, Folder, Scratch, Standing, Target
from mergeway.fold.parts import PartFolder
from mergeway.fold.prepare import Arrival, Base
from mergeway.fold.whole import ModelFolder
from mergeway.model.compute import Compute
from mergeway.rules.rule import Fold, ModelRule, PartRule, Rule, SeesMatrices


class Outlet(Protocol):
    """Where the results of a stream go. `every`: the model is wanted after each fold, not only after the last."""

    every: bool
    # Whether the state after the last fold is wanted too.
    keeps: bool

    def state(self, infos: Mapping[str, TensorInfo]) -> Scratch: ...

    def model(self, infos: Mapping[str, TensorInfo]) -> Sink: ...


@dataclass(frozen=True)
class Folded:
    """The stream after a fold: where it stands, the state that the next fold starts from, and what the rule reported."""

    at: Fold
    state: Checkpoint | None
    details: Mapping[str, object]
    # With the answers of every arrival so far.
    objective: Objective | None = None


def folder_of(
    rule: Rule,
    base: Base,
    pool: Executor,
    progress: Progress = SILENT,
    team: Team = ALONE,
    compute: Compute | None = None,
) -> Folder:
    """How a rule of this kind is folded; `compute` says where."""
    if isinstance(rule, ModelRule):
        return ModelFolder(rule, base, pool, progress, team)
    assert isinstance(rule, PartRule)
    return PartFolder(rule, base, pool, progress, team, _device(rule, base, compute))


def _device(rule: PartRule, base: Base, compute: Compute | None) -> torch.device:
    """Where parts are folded: on the device that you name. `auto` means the CPU, so that bits do not depend on the machine."""
    if compute is None or compute.device == "auto":
        return CPU
    precise = isinstance(rule, SeesMatrices) or any(i.dtype is torch.float64 for i in base.merged_infos.values())
    if compute.where.type == "mps" and precise:
        raise OptionError(f"--device mps: has no float64, and rule '{rule.name}' needs it here; use --device cpu")
    return compute.where


def fold_stream(
    folder: Folder,
    arrivals: Sequence[Arrival],
    outlet: Outlet,
    objective: Objective | None = None,
    standing: Standing | None = None,
) -> Iterator[Folded]:
    """Fold arrivals one after another, from the start of a stream or from where it stands; yields after every fold.

    Arrivals that nobody looks between share one walk over the model, where the rule allows it.
    """
    if folder.asks == "tasks" and objective is None:
        raise OptionError(
            f"rule '{folder.rule.name}' needs calibration data: give --data and --head with an arrival, --suite or --objective with a stream (objective=... in Python)"
        )
    standing = standing or Standing()
    together = folder.takes_many and not outlet.every
    groups = [list(arrivals)] if together else [[arrival] for arrival in arrivals]
    before: Scratch | None = None
    for number, group in enumerate(groups, 1):
        last = number == len(groups)
        weights = (*standing.weights, *(arrival.weight for arrival in group))
        objective = folder.ask(objective, weights, group[-1])
        seen = objective.seen(len(weights), weights) if objective is not None and folder.asks == "tasks" else None
        model = outlet.model(folder.base.checkpoint.infos) if last or outlet.every else None
        wanted = outlet.keeps or not last or folder.reads_back
        kept = outlet.state(folder.state_infos()) if wanted else None
        at, details = folder.fold(group, standing, seen, Target(kept, model))
        if model is not None:
            folder.copy_buffers(model)
        if before is not None:
            before.drop()
        standing, before = Standing(at, kept.read() if kept else None, weights), kept
        yield Folded(at, standing.state, details, objective)
    if before is not None and not outlet.keeps:
        before.drop()
