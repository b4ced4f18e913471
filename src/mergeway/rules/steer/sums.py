"""What a fold of `steer` adds up: the sum of the updates, their mean, what is carried on, and how far arrivals moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mergeway.core.linalg import squared_norm
from mergeway.rules.rule import Fold, Incoming, Params
from mergeway.rules.steer.directions import Directions, whole_shape


@dataclass(frozen=True)
class Sums:
    """What a fold adds up. It is read and added anew each time: what is not kept takes no memory while the model is taught.

    Each tensor is worked out in the one that is kept: what else is taken on the way leaves holes as large as the model.
    """

    at: Fold
    given: Incoming

    def total(self) -> Iterator[tuple[str, Tensor]]:
        """Σ w_i δ_i, the new arrival among them."""
        before = self.given.state.get("sum")
        for n, b in self.given.base.items():
            delta = (self.given.arrival[n] - b).mul_(self.at.weight)
            yield n, delta if before is None else delta.add_(before[n])

    def mean(self) -> Params:
        """The base with the mean of the updates."""
        return {n: s.div_(self.at.step * self.at.mean_weight).add_(self.given.base[n]) for n, s in self.total()}

    def ground(self) -> Params:
        """The base with what is carried on from earlier folds."""
        carried = self.given.state["carried"]
        return {n: b + carried[n] for n, b in self.given.base.items()}

    def carried_on(self, share: float, start: Params, model: Params) -> Params:
        """R_k = share·(R_{k−1} + model − start); a tensor of the start goes as soon as it was used."""
        carried = self.given.state["carried"]
        return {n: (carried[n] + model[n]).sub_(start.pop(n)).mul_(share) for n in list(start)}

    def untaught(self, share: float) -> Params:
        """The same where nothing was taught."""
        return {n: share * carried for n, carried in self.given.state["carried"].items()}

    def zeros(self) -> Params:
        return {n: torch.zeros_like(b) for n, b in self.given.base.items()}

    def directions(self, sees_matrix: Callable[[str, tuple[int, ...]], bool]) -> Directions:
        """Those of S = k·Σ w_i δ_i / W_k, under a flat spectrum."""
        total = ((n, s / self.at.mean_weight) for n, s in self.total())
        return Directions.of_sum(total, self.at.step, sees_matrix, self.given.team)

    def squares(self, matrices: Collection[str]) -> tuple[float, float]:
        """‖ψ_0‖² and ‖Σ w_i δ_i‖² over these tensors."""
        base = math.fsum(squared_norm(self.given.base[n]) for n in matrices)
        total = math.fsum(squared_norm(s) for n, s in self.total() if n in matrices)
        base, total = self.given.team.add_up([base, total])
        return base, total


def sizes_of_updates(
    at: Fold, given: Incoming, sees_matrix: Callable[[str, tuple[int, ...]], bool]
) -> dict[str, float]:
    """`update`: the mean over the arrivals so far of the root mean square of what each one moved. `spread`: Σ w_i‖δ_i‖², linear weights."""
    squares, spread, count = list[float](), list[float](), 0
    for n, b in given.base.items():
        moved = (given.arrival[n] - b).double()
        squares.append(squared_norm(moved))
        spread.extend(squares[-1:] if sees_matrix(n, whole_shape(b, given.team)) else [])
        count += int(moved.count_nonzero())
    square, apart, number = given.team.add_up([math.fsum(squares), math.fsum(spread), float(count)])
    new = math.sqrt(square / number) if number else 0.0
    before = at.facts.get("update", 0.0)
    return {
        "update": before + (new - before) / at.step,
        "spread": at.facts.get("spread", 0.0) + at.weight * apart,
    }
