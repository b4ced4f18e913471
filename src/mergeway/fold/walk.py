"""One pass of a rule over a model: parameters are read, folded and written one at a time, several side by side.

Each parameter is worked on by one thread with torch's own threading off, so that the bits depend neither on the number of
threads nor on how the checkpoint is cut into shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

import torch
from torch import Tensor

from mergeway.calibration.shared import ShardedObjective, SplitObjective, cut, offset
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.inspect import is_finite
from mergeway.checkpoint.writer import Sink
from mergeway.core.allocator import Tidy
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import team
from mergeway.core.tensors import Part, TensorInfo, parts, wide
from mergeway.errors import CheckpointError
from mergeway.fold.prepare import Arrival, Base
from mergeway.rules import Fold, Rule
from mergeway.rules.fold import Memory, Params, Whole


def memory_infos(rule: Rule, base: Base) -> dict[str, TensorInfo]:
    """The tensors of a rule's memory: one for each slot and merged parameter, at least float32."""
    return {
        slot_name(slot, name): TensorInfo(
            rule.slot_shape(slot, base.tied.get(name, name), info.shape), wide(info.dtype)
        )
        for slot in rule.slots
        for name, info in base.merged_infos.items()
    }


def slot_name(slot: str, name: str) -> str:
    """What a slot of a parameter is called in a memory file."""
    return f"{slot}/{name}"


@dataclass
class Pass:
    """A rule's way over the parameters of one model."""

    rule: Rule
    base: Base
    pool: Executor
    progress: Progress = SILENT

    def fold(
        self, arrivals: Sequence[Arrival], at: Fold, memory: Checkpoint | None, keep: Sink | None, model: Sink | None
    ) -> Fold:
        """Fold arrivals into `memory` (None at the start of a stream) and hand the new memory to `keep`.

        The deployed tensors go to `model` in the same pass, unless the rule has to see the whole model first; then call
        `deploy`. Parameters are the outer loop, so several arrivals cost one walk; a rule that surveys takes one at a time.
        """
        folds = []
        for arrival in arrivals:
            at = at.next(arrival.weight)
            folds.append(at)
        if self.rule.surveys:
            at = at.settled(self._survey(arrivals[0], at, memory))
            folds = [at]
        deploy_to = None if self.rule.settles else model
        brought = [arrival.bring() if arrival.bring else {} for arrival in arrivals]

        def job(name: str) -> list[dict[str, float]]:
            readers = [arrival.read(name) for arrival in arrivals]
            tallies: list[dict[str, float]] = [{} for _ in arrivals]
            for part, origin, before in self._parts(name, memory):
                for fold, reader, more, tally in zip(folds, readers, brought, tallies, strict=True):
                    delta = _cut(reader, part).to(origin.dtype) - origin
                    after = self._fold(fold, part, delta, before, more.get(name))
                    if self.rule.settles:
                        _add(tally, self.rule.tally(fold, delta, before, after))
                    before = after
                self._keep(keep, name, part, before)
                if deploy_to is not None:
                    self._deploy(deploy_to, name, part, origin, before, folds[-1])
            self.progress.advance(self.base.checkpoint.infos[name].nbytes)
            return tallies

        tallies = self._each("folding", job)
        if self.rule.settles:
            facts: Mapping[str, float] = at.facts
            for i, fold in enumerate(folds):
                # An empty tensor has no parts and so no tally.
                keys = {key for t in tallies for key in t[i]}
                sums = {key: fsum(t[i].get(key, 0.0) for t in tallies) for key in keys}
                at = replace(fold, facts=facts)
                facts = {**facts, **self.rule.settle(at, sums)}
            at = at.settled(facts)
        return at

    def merge_whole(
        self, arrival: Arrival, at: Fold, memory: Checkpoint | None, objective: Any, deploy: bool = True
    ) -> tuple[Fold, Whole]:
        """One arrival by a rule that sees the whole model at once; without `deploy` the memory is all that is wanted."""
        at = at.next(arrival.weight)
        infos = self.base.merged_infos
        own = cut if self._in_rows else lambda tensor: tensor
        objective = self._shared(objective)
        slots = self.rule.slots if memory else ()
        held = {slot: {n: own(memory.read(slot_name(slot, n))) for n in infos} for slot in slots}  # type: ignore[union-attr]
        start = {n: own(self.base.checkpoint.read(n)).to(wide(i.dtype)) for n, i in infos.items()}
        target = {n: own(arrival.read(n)).to(wide(i.dtype)) for n, i in infos.items()}
        if not deploy and (kept := self.rule.remember(at, start, held, target)) is not None:
            return at, Whole(kept, {})
        self.progress.begin("merging", None, "passes")
        whole = self.rule.merge(at, start, held, target, objective)
        return at.settled(whole.facts), whole

    def polish_whole(self, deployed: Params, objective: Any) -> tuple[Params, dict[str, Any]] | None:
        """A last stage of a whole-model rule, if it has one."""
        return self.rule.polish(deployed, self._shared(objective))

    def keep_whole(self, memory: Mapping[str, Mapping[str, Tensor]], keep: Sink) -> None:
        """Hand the memory of a whole-model rule on."""
        for slot, tensors in memory.items():
            for name, tensor in tensors.items():
                self._write_own(keep, slot_name(slot, name), self.base.merged_infos[name], tensor)

    def deploy_whole(self, tensors: Mapping[str, Tensor], model: Sink) -> None:
        """Round a deployed model to the base's dtypes and write it."""
        for name, info in self.base.merged_infos.items():
            self._write_own(model, name, info, _checked(name, tensors[name].to(info.dtype)))

    @property
    def _in_rows(self) -> bool:
        """Whether each rank holds its rows of the model; others need them whole."""
        return team().count > 1 and self.rule.by_rows

    def _shared(self, objective: Any) -> Any:
        """The objective with the work on it shared between the ranks."""
        if team().count == 1:
            return objective
        return ShardedObjective(objective) if self._in_rows else SplitObjective(objective)

    def _write_own(self, sink: Sink, name: str, info: TensorInfo, tensor: Tensor) -> None:
        """What this rank has to write: its rows, or all of it if it is the lead."""
        if self._in_rows or team().lead:
            sink.write(name, offset(info.shape) if self._in_rows else 0, tensor)

    def unfold(self, arrival: Arrival, at: Fold, memory: Checkpoint, keep: Sink) -> Fold:
        """Take an arrival out of the memory of an additive rule."""
        leaving = replace(at, weight=arrival.weight)

        def job(name: str) -> None:
            reader = arrival.read(name)
            for part, origin, before in self._parts(name, memory):
                delta = _cut(reader, part).to(origin.dtype) - origin
                self._keep(keep, name, part, self.rule.unfold(leaving, part, delta, before))
            self.progress.advance(self.base.checkpoint.infos[name].nbytes)

        self._each("removing", job)
        return at.without(arrival.weight)

    def deploy(self, at: Fold, memory: Checkpoint, model: Sink) -> None:
        """Work out the deployed tensors from a memory."""

        def job(name: str) -> None:
            for part, origin, held in self._parts(name, memory):
                self._deploy(model, name, part, origin, held, at)
            self.progress.advance(self.base.checkpoint.infos[name].nbytes)

        self._each("writing", job)

    def copy_buffers(self, model: Sink) -> None:
        """Integer and boolean buffers, and tensors that are no task's to change, as they are in the base."""
        if not team().lead:
            return
        for name in self.base.checkpoint.infos:
            if name not in self.base.merged_infos:
                model.write(name, 0, self.base.checkpoint.read(name))

    def _fold(self, at: Fold, part: Part, delta: Tensor, memory: Memory, brought: Tensor | None) -> Memory:
        if self.rule.brings is None:
            return self.rule.fold(at, part, delta, memory)
        if brought is not None:
            brought = (_cut(brought, part) if self.rule.brings == "moments" else brought).to(delta.dtype)
        return self.rule.fold_with(at, part, delta, memory, brought)

    def _survey(self, arrival: Arrival, at: Fold, memory: Checkpoint | None) -> dict[str, float]:
        def walk(look: Any) -> list[Any]:
            def job(name: str) -> list[Any]:
                reader = arrival.read(name)
                return [
                    look(_cut(reader, part).to(origin.dtype) - origin, held)
                    for part, origin, held in self._parts(name, memory)
                ]

            return [result for results in self.pool.map(job, self.base.merged_infos) for result in results]

        return self.rule.survey(at, self.base.size, walk)

    def _each(self, what: str, job: Any) -> list[Any]:
        infos = self.base.merged_infos
        self.progress.begin(what, sum(info.nbytes for info in infos.values()), "bytes")
        tidy = Tidy()

        def one(name: str) -> Any:
            made = job(name)
            tidy.passed(infos[name].nbytes)
            return made

        return list(self.pool.map(one, infos))

    def _parts(self, name: str, memory: Checkpoint | None) -> Iterable[tuple[Part, Tensor, Memory]]:
        """The parts of a parameter with the base's values and the rule's memory; tied names are one parameter to the rule."""
        info = self.base.checkpoint.infos[name]
        known_as = self.base.tied.get(name, name)
        tensor = self.base.checkpoint.read(name)
        held = {slot: memory.read(slot_name(slot, name)) for slot in self.rule.slots} if memory else {}
        shapes = {slot: self.rule.slot_shape(slot, known_as, info.shape) for slot in self.rule.slots}
        for part in parts(known_as, info.shape, self.rule.sees_matrix(known_as, info.shape)):
            origin = _cut(tensor, part).to(wide(info.dtype))
            before = {}
            for slot, shape in shapes.items():
                like = shape == info.shape
                if held:
                    before[slot] = _cut(held[slot], part) if like else held[slot]
                else:
                    before[slot] = torch.zeros_like(origin) if like else torch.zeros(shape, dtype=origin.dtype)
            yield part, origin, before

    def _keep(self, keep: Sink | None, name: str, part: Part, memory: Memory) -> None:
        if keep is not None:
            for slot, tensor in memory.items():
                keep.write(slot_name(slot, name), part.start, tensor)

    def _deploy(self, model: Sink, name: str, part: Part, origin: Tensor, memory: Memory, at: Fold) -> None:
        update = self.rule.update(at, part, memory) if at.step else torch.zeros_like(origin)
        tensor = _checked(name, (origin + update).to(self.base.checkpoint.infos[name].dtype))
        model.write(name, part.start, tensor)


def _checked(name: str, tensor: Tensor) -> Tensor:
    if not is_finite(tensor):
        raise CheckpointError(
            f"the merged tensor '{name}' does not fit into {tensor.dtype}; lower the rule's scaling or use a wider base"
        )
    return tensor


def _cut(tensor: Tensor, part: Part) -> Tensor:
    return tensor.reshape(part.matrix) if part.matrix else tensor.reshape(-1)[part.start : part.stop]


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value
