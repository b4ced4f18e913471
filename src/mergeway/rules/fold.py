"""What passes between a stream and a rule: where a fold stands, the memory of a part, the result of a whole merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

# One tensor for each of the rule's slots, shaped like the part it belongs to unless the rule says otherwise.
Memory = dict[str, Tensor]

# Named tensors of a whole model, in the dtype of the arithmetic.
Params = dict[str, Tensor]

# Applies f(delta, memory) to every block of the model and returns the results in order.
Walk = Callable[[Callable[[Tensor, Memory], Any]], list[Any]]


@dataclass(frozen=True)
class Fold:
    """Where in the stream a fold stands: the k-th arrival, its weight w_k, the sum W_k, and the facts settled so far."""

    step: int = 0
    weight: float = 0.0
    total: float = 0.0
    facts: Mapping[str, float] = field(default_factory=dict)

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


@dataclass
class Whole:
    """What a rule that sees the whole model makes of one arrival: its memory, the deployed model, and what it measured."""

    memory: dict[str, Params]
    deployed: Params
    facts: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
