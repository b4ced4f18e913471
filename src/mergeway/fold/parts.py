"""The fold of a `PartRule`: parameters are read, folded and written one at a time, several side by side.

Each parameter is worked on by one thread with torch's own threading off, so that the bits depend neither on the number of
threads nor on how the checkpoint is cut into shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import TypeVar

import torch
from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.writer import Sink
from mergeway.core.pool import MemoryTrimmer
from mergeway.core.tensors import Part, parts, wide
from mergeway.fold.ahead import reading_ahead
from mergeway.fold.folder import CPU, Asks, Folder, Scratch, Standing, Target, slot_name
from mergeway.fold.prepare import Arrival
from mergeway.rules.rule import Fold, PartRule, Removable, Settles, State, Surveys, Wants, WantsMoments

T = TypeVar("T")
Facts = dict[str, float]


@dataclass(frozen=True)
class PartFolder(Folder):
    """Parameters are the outer loop, so several arrivals cost one walk; a rule that surveys takes one at a time."""

    rule: PartRule

    @property
    def takes_many(self) -> bool:
        return not isinstance(self.rule, Surveys | Wants)

    @property
    def reads_back(self) -> bool:
        return self._settler is not None

    @property
    def _settler(self) -> Settles | None:
        return self.rule if isinstance(self.rule, Settles) and self.rule.settles else None

    @property
    def asks(self) -> Asks:
        return "arrival" if isinstance(self.rule, Wants) else "nothing"

    def fold(
        self, arrivals: Sequence[Arrival], standing: Standing, objective: Objective | None, to: Target
    ) -> tuple[Fold, Mapping[str, object]]:
        at = standing.at
        folds: list[Fold] = []
        for arrival in arrivals:
            at = at.next(arrival.weight)
            folds.append(at)
        if isinstance(self.rule, Surveys):
            at = at.settled(self._survey(self.rule, arrivals[0], at, standing.state))
            folds = [at]
        kept = to.state.sink if to.state else None
        at = self._fold(arrivals, folds, standing.state, kept, None if self.reads_back else to.model)
        if self.reads_back and to.model is not None:
            assert to.state is not None
            self.deploy(at, to.state.read(), to.model)
        return at, {}

    def _fold(
        self,
        arrivals: Sequence[Arrival],
        folds: list[Fold],
        state: Checkpoint | None,
        kept: Sink | None,
        model: Sink | None,
    ) -> Fold:
        settler = self._settler
        extras: list[Mapping[str, Tensor]] = [arrival.extras() if arrival.extras else {} for arrival in arrivals]

        def one(name: str) -> list[Facts]:
            readers = [arrival.read(name) for arrival in arrivals]
            tallies: list[Facts] = [{} for _ in arrivals]
            for part, origin, held in self._parts(name, state):
                for fold, reader, extra, tally in zip(folds, readers, extras, tallies, strict=True):
                    delta = _beside(origin, _cut(reader, part)) - origin
                    after = self._fold_part(fold, part, delta, held, extra.get(name))
                    if settler is not None:
                        _add(tally, settler.tally(fold, part, origin, delta, held, after))
                    held = after
                self._keep(kept, name, part, held)
                if model is not None:
                    self._deploy(model, name, part, origin, held, folds[-1])
            return tallies

        return self._settled(folds, self._each("folding", one, arrivals, state))

    def _settled(self, folds: list[Fold], tallies: list[list[Facts]]) -> Fold:
        """The last fold with what follows from the sums over all parameters, fold after fold."""
        if self._settler is None:
            return folds[-1]
        at, facts = folds[-1], folds[-1].facts
        for i, fold in enumerate(folds):
            # An empty tensor has no parts and so no tally.
            keys = {key for t in tallies for key in t[i]}
            at = replace(fold, facts=facts)
            facts = {**facts, **self._settler.settle(at, {k: fsum(t[i].get(k, 0.0) for t in tallies) for k in keys})}
        return at.settled(facts)

    def unfold(self, arrival: Arrival, standing: Standing, kept: Scratch, model: Sink) -> Fold:
        """Take an arrival out of the state, and work the model out again."""
        rule, state = self.rule, standing.state
        assert isinstance(rule, Removable) and state is not None
        leaving = replace(standing.at, weight=arrival.weight)

        settler = self._settler

        def one(name: str) -> list[Facts]:
            reader = arrival.read(name)
            tally: Facts = {}
            for part, origin, held in self._parts(name, state):
                delta = _beside(origin, _cut(reader, part)) - origin
                after = rule.unfold(leaving, part, delta, held)
                if settler is not None:
                    _add(tally, settler.tally(leaving, part, origin, delta, held, after))
                self._keep(kept.sink, name, part, after)
            return [tally]

        at = standing.at.without(arrival.weight)
        at = replace(
            self._settled(
                [replace(at, weight=-arrival.weight)], self._each("removing", one, [arrival], standing.state)
            ),
            weight=at.weight,
        )
        self.deploy(at, kept.read(), model)
        self.copy_buffers(model)
        return at

    def deploy(self, at: Fold, state: Checkpoint, model: Sink) -> None:
        """Work out the deployed tensors from a state."""

        def one(name: str) -> None:
            for part, origin, held in self._parts(name, state):
                self._deploy(model, name, part, origin, held, at)

        self._each("writing", one, [], state)

    def _fold_part(self, at: Fold, part: Part, delta: Tensor, state: State, extra: Tensor | None) -> State:
        rule = self.rule
        if not isinstance(rule, Wants):
            return rule.fold(at, part, delta, state)
        if extra is not None:
            # Moments are shaped like the parameter, Gram matrices belong to it as a whole.
            extra = _beside(delta, _cut(extra, part) if isinstance(rule, WantsMoments) else extra)
        return rule.fold(at, part, delta, state, extra)

    def _survey(self, rule: Surveys, arrival: Arrival, at: Fold, state: Checkpoint | None) -> Facts:
        def look(f: Callable[[Tensor, State], T], /) -> list[T]:
            def one(name: str) -> list[T]:
                reader = arrival.read(name)
                return [
                    f(_beside(origin, _cut(reader, part)) - origin, held)
                    for part, origin, held in self._parts(name, state)
                ]

            return [result for results in self._each("looking", one, [arrival], state) for result in results]

        return rule.survey(at, self.base.size, look)

    def _each(
        self, what: str, job: Callable[[str], T], arrivals: Sequence[Arrival], state: Checkpoint | None
    ) -> list[T]:
        """Walk over the parameters of the base, the arrivals and the state."""
        infos = self.base.merged_infos
        self.progress.begin(what, sum(info.nbytes for info in infos.values()), "bytes")
        trimmer = MemoryTrimmer()

        def expect(name: str) -> None:
            self.base.checkpoint.expect(name)
            for arrival in arrivals:
                arrival.expect(name)
            if state is not None:
                for slot in self.rule.slots:
                    state.expect(slot_name(slot, name))

        with reading_ahead(list(infos), expect) as reached:

            def one(name: str) -> T:
                reached(name)
                result = job(name)
                self.progress.advance(infos[name].nbytes)
                trimmer.passed(infos[name].nbytes)
                return result

            return list(self.pool.map(one, infos))

    def _parts(self, name: str, state: Checkpoint | None) -> Iterator[tuple[Part, Tensor, State]]:
        """The parts of a parameter with the base's values and the rule's state; tied names are one parameter to the rule."""
        info = self.base.checkpoint.infos[name]
        known_as = self.base.tied.get(name, name)
        tensor = self.base.checkpoint.read(name)
        stored = {slot: state.read(slot_name(slot, name)) for slot in self.rule.slots} if state else {}
        shapes = {slot: self.rule.slot_shape(slot, known_as, info.shape) for slot in self.rule.slots}
        for part in parts(known_as, info.shape, self.rule.sees_matrix(known_as, info.shape)):
            origin = _cut(tensor, part).to(self.device).to(wide(info.dtype))
            held: State = {}
            for slot, shape in shapes.items():
                like = shape == info.shape
                if stored:
                    held[slot] = (_cut(stored[slot], part) if like else stored[slot]).to(self.device)
                else:
                    held[slot] = torch.zeros_like(origin) if like else origin.new_zeros(shape)
            yield part, origin, held

    def _keep(self, kept: Sink | None, name: str, part: Part, state: State) -> None:
        if kept is not None:
            for slot, tensor in state.items():
                kept.write(slot_name(slot, name), part.start, tensor.to(CPU))

    def _deploy(self, model: Sink, name: str, part: Part, origin: Tensor, state: State, at: Fold) -> None:
        update = self.rule.update(at, part, state) if at.step else torch.zeros_like(origin)
        model.write(name, part.start, self.rounded(name, origin + update).to(CPU))


def _cut(tensor: Tensor, part: Part) -> Tensor:
    return tensor.reshape(part.matrix) if part.matrix else tensor.reshape(-1)[part.start : part.stop]


def _beside(other: Tensor, tensor: Tensor) -> Tensor:
    """On the device of the other, and there in its dtype: what is widened before it goes takes twice the bus."""
    return tensor.to(other.device).to(other.dtype)


def _add(total: Facts, more: Mapping[str, float]) -> None:
    for key, value in more.items():
        total[key] = total.get(key, 0.0) + value
