"""What a rule is: how one arrival is folded into a constant-size memory, and how that memory becomes the deployed update."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from mergeway.core.tensors import Part, is_linear
from mergeway.errors import OptionError, suggest
from mergeway.rules.fold import Fold, Memory, Params, Walk, Whole
from mergeway.rules.options import read_option


@dataclass(frozen=True)
class Rule:
    """A merging rule: frozen options, pure functions of tensors.

    A part is either a whole matrix (when `matrices` is set and the parameter is a linear weight) or a block of a flattened
    parameter, so a rule must treat anything but matrices element by element. `fold` may use only what `survey` found out
    about this fold; what `settle` works out from the whole model is for `update`. A rule that cannot work part by part sets
    `whole` and implements `merge` (and `polish`) instead of `fold` and `update`. A rule whose arrivals bring something besides
    their weights says what in `brings` and implements `fold_with` instead of `fold`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    slots: ClassVar[tuple[str, ...]] = ("sum",)
    needs: ClassVar[frozenset[str]] = frozenset()
    matrices: ClassVar[bool] = False
    surveys: ClassVar[bool] = False
    settles: ClassVar[bool] = False
    additive: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    # A whole-model rule that never looks at the shape of a matrix: each rank may hold rows of the model only.
    by_rows: ClassVar[bool] = False
    # The slot that holds the deployed update itself: a stream goes on from a model that was changed after its fold.
    carries: ClassVar[str | None] = None
    brings: ClassVar[Literal["moments", "grams"] | None] = None

    def survey(self, at: Fold, size: int, walk: Walk) -> dict[str, float]:
        """Facts about the whole model that this fold needs before it starts (only when `surveys`)."""
        raise NotImplementedError

    def fold(self, at: Fold, part: Part, delta: Tensor, memory: Memory) -> Memory:
        """The memory after the k-th arrival, whose update is δ_k = ψ_k − ψ_0."""
        raise NotImplementedError

    def fold_with(self, at: Fold, part: Part, delta: Tensor, memory: Memory, brought: Tensor | None) -> Memory:
        """As `fold`, with what the arrival brings for this part, if anything (only when `brings`)."""
        raise NotImplementedError

    def tally(self, at: Fold, delta: Tensor, before: Memory, after: Memory) -> dict[str, float]:
        """Contributions of a part to whole-model sums (only when `settles`)."""
        raise NotImplementedError

    def settle(self, at: Fold, sums: Mapping[str, float]) -> dict[str, float]:
        """Facts that follow from the sums of the tallies (only when `settles`)."""
        raise NotImplementedError

    def update(self, at: Fold, part: Part, memory: Memory) -> Tensor:
        """Ψ_k − ψ_0, what to add to the base."""
        raise NotImplementedError

    def unfold(self, at: Fold, part: Part, delta: Tensor, memory: Memory) -> Memory:
        """The memory without an arrival that was folded in earlier (only when `additive`)."""
        return {"sum": memory["sum"] - at.weight * delta}

    def merge(self, at: Fold, base: Params, memory: dict[str, Params], arrival: Params, objective: Any) -> Whole:
        """The model after the k-th arrival (only when `whole`); `memory` is empty at the first."""
        raise NotImplementedError

    def remember(self, at: Fold, base: Params, memory: dict[str, Params], arrival: Params) -> dict[str, Params] | None:
        """The memory that `merge` would leave, where that takes no data: a stream in one go then merges only at its end."""
        return None

    def polish(self, deployed: Params, objective: Any) -> tuple[Params, dict[str, Any]] | None:
        """A last stage on the deployed model that the stream does not continue from (only when `whole`)."""
        return None

    def sees_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter is handed over whole, as a matrix."""
        return self.matrices and is_linear(name, shape, getattr(self, "linear", None))

    def slot_shape(self, slot: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a slot of the memory for a parameter: its own, unless the rule keeps something else."""
        return shape

    def options(self) -> dict[str, Any]:
        """The options by name, as they are written into a journal."""
        return dataclasses.asdict(self)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Rule:
        """The rule with these options; text is read as the option's type, anything unknown or unfit is an error."""
        hints = typing.get_type_hints(cls)
        known = {f.name for f in dataclasses.fields(cls)}
        values = {}
        for key, value in options.items():
            if key not in known:
                raise OptionError(f"rule '{cls.name}' has no option '{key}'; {suggest(key, known)}")
            values[key] = read_option(f"option '{key}' of rule '{cls.name}'", value, hints[key])
        return cls(**values)
