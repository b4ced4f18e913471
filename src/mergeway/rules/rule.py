"""What a rule is: one of two kinds, `PartRule` or `ModelRule`, and types for what else it can do or wants."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.core.progress import SILENT, Progress
from mergeway.core.ranks import ALONE, Team
from mergeway.core.tensors import Part, is_linear
from mergeway.errors import OptionError, suggest
from mergeway.rules.options import read_option

# What a rule keeps of one part: a tensor for each of its slots, shaped like the part unless the rule says otherwise.
State = dict[str, Tensor]

# Named tensors of a whole model, in the dtype of the arithmetic.
Params = dict[str, Tensor]
# The same as a fold is given them: a tensor may be read from its file anew whenever it is asked for, and is not to be changed.
Lent = Mapping[str, Tensor]

T = TypeVar("T")
R = TypeVar("R", bound="Rule")


@dataclass(frozen=True)
class Fold:
    """Where in the stream a fold stands: the k-th arrival, its weight w_k, the sum W_k, and the facts settled so far."""

    step: int = 0
    weight: float = 0.0
    total: float = 0.0
    facts: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def eta(self) -> float:
        """η_k = w_k/W_k, the share of the incoming arrival (Eq. 44, ODE-M)."""
        return self.weight / self.total

    @property
    def mean_weight(self) -> float:
        """W_k/k: dividing by it makes equal weights, whatever their value, the unweighted rule."""
        return self.total / self.step

    @property
    def relative_weight(self) -> float:
        """w_k against the mean weight of the arrivals before it; 1 for equal weights and for the first."""
        return self.weight * (self.step - 1) / (self.total - self.weight) if self.step > 1 else 1.0

    def next(self, weight: float) -> Fold:
        """The fold of one more arrival."""
        return Fold(self.step + 1, weight, self.total + weight, self.facts)

    def without(self, weight: float) -> Fold:
        """The stream after taking out an arrival of that weight."""
        return Fold(self.step - 1, weight, self.total - weight if self.step > 1 else 0.0, self.facts)

    def settled(self, facts: Mapping[str, float]) -> Fold:
        """The same fold, knowing more."""
        return dataclasses.replace(self, facts={**self.facts, **facts})


@dataclass(frozen=True)
class Incoming:
    """What a whole model's fold starts from: the base, the rule's state (empty at the first fold), the arrival and the loss.

    `team` are the processes that work on it together; `progress` is told of long work.
    """

    base: Lent
    state: Mapping[str, Lent]
    arrival: Lent
    objective: Objective
    team: Team = ALONE
    progress: Progress = SILENT


@dataclass
class Merged:
    """The model after one arrival: the rule's new state, the deployed tensors, and what was measured on the way."""

    state: dict[str, Params]
    deployed: Params
    facts: dict[str, float] = field(default_factory=dict[str, float])
    details: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class Rule:
    """A merging rule: frozen options and pure functions of tensors. Derive from `PartRule` or `ModelRule`."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    # The tensors that the state holds for every parameter.
    slots: ClassVar[tuple[str, ...]] = ("sum",)
    # What a fold takes besides weights; the types below say it.
    needs: ClassVar[frozenset[str]] = frozenset()

    def slot_shape(self, slot: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a slot for a parameter: its own, unless the rule keeps something else."""
        return shape

    def options(self) -> dict[str, object]:
        """The options by name, as they are written into a journal."""
        return dataclasses.asdict(self)

    @classmethod
    def from_options(cls: type[R], options: Mapping[str, object]) -> R:
        """The rule with these options; text is read as the option's type, anything unknown or unfit is an error."""
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, object] = {}
        for key, value in options.items():
            if key not in known:
                raise OptionError(f"rule '{cls.name}' has no option '{key}'; {suggest(key, known)}")
            values[key] = read_option(f"option '{key}' of rule '{cls.name}'", value, hints[key])
        return cls(**values)


class PartRule(Rule):
    """Folds a model part by part: a part is a block of a flattened parameter, which is treated element by element.

    With `SeesMatrices` the weight of a linear layer comes whole, as a matrix.
    """

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        """The state after the k-th arrival, whose update is δ_k = ψ_k − ψ_0."""
        raise NotImplementedError

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        """Ψ_k − ψ_0, what to add to the base."""
        raise NotImplementedError

    def sees_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter is handed over whole, as a matrix."""
        return False


class ModelRule(Rule):
    """Folds a whole model at once, with an objective."""

    def merge(self, at: Fold, given: Incoming) -> Merged:
        """The model after the k-th arrival."""
        raise NotImplementedError

    def finish(
        self, deployed: Params, objective: Objective, team: Team = ALONE
    ) -> tuple[Params, dict[str, object]] | None:
        """A last stage on the deployed model, which the stream does not continue from, and what it measured."""
        return None


class SeesMatrices:
    """Weights of linear layers come whole, as matrices; `linear`, a regular expression, says which they are."""

    linear: str | None

    def sees_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        return is_linear(name, shape, self.linear)


class Surveys:
    """A part rule that has to look at the whole model before a fold starts."""

    def survey(self, at: Fold, size: int, look: Look) -> dict[str, float]:
        """Facts that this fold needs; `look(f)` applies f(delta, state) to every block and returns the results in order."""
        raise NotImplementedError


class Settles:
    """A part rule whose update depends on sums over the whole model; `fold` may not use what `settle` finds."""

    @property
    def settles(self) -> bool:
        """Whether it does so with these options; if not, a model is written in the walk that folds it."""
        return True

    def tally(self, at: Fold, part: Part, base: Tensor, delta: Tensor, before: State, after: State) -> dict[str, float]:
        """What a part adds to the sums."""
        raise NotImplementedError

    def settle(self, at: Fold, sums: Mapping[str, float]) -> dict[str, float]:
        """Facts that follow from the sums; when an arrival is taken out again, its weight in `at` is negative."""
        raise NotImplementedError


class Removable:
    """A part rule whose state is the sum Σ w_i δ_i, so that an arrival can be taken out again."""

    def unfold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        return {"sum": state["sum"] - at.weight * delta}


class KeepsDeployed:
    """The state holds the deployed update, in the slot `update`: a stream goes on from a model that was changed after a fold."""

    def changed(self, state: State, base: Tensor, deployed: Tensor) -> State:
        """The state of a parameter whose deployed value is now another."""
        return {**state, "update": deployed - base}


class Wants(PartRule):
    """A part rule whose arrivals bring one more tensor a parameter; `fold` takes it as `extra`, or None where there is none."""

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State, extra: Tensor | None = None) -> State:
        raise NotImplementedError


class WantsMoments(Wants):
    """The extra tensors are Adam's second moments, shaped like the parameters."""

    needs: ClassVar[frozenset[str]] = frozenset({"moments"})


class WantsGrams(Wants):
    """The extra tensors are Gram matrices XᵀX/n of the inputs of linear layers."""

    needs: ClassVar[frozenset[str]] = frozenset({"calibration"})


class WantsSamples:
    """A model rule that asks the objective: it needs calibration samples, or a loss of your own."""

    needs: ClassVar[frozenset[str]] = frozenset({"calibration"})


class WantsAnswers(WantsSamples):
    """The arrival itself is asked about its samples and their copies, and its answers take the place of labels."""

    @property
    def asks_arrivals(self) -> bool:
        """Whether it is asked even where the samples have labels."""
        return True


class ByRows:
    """A model rule whose ranks may each hold their rows of the model only; a matrix that it must see whole it brings together."""


class Look(typing.Protocol):
    """Applies f(delta, state) to every block of the model and returns the results in order."""

    def __call__(self, f: Callable[[Tensor, State], T], /) -> list[T]: ...
