"""The released code's barrier for each task, which is not in the paper: a field that constraints hold back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from mergeway.core.ranks import ALONE, Team
from mergeway.rules.ode.field import Field, Slope, scheduler
from mergeway.rules.ode.flat import inner
from mergeway.rules.ode.stops import Stops
from mergeway.rules.ode.task_gradients import equalised, task_gradients

SLACK = 0.08  # what a task may rise above the line between its end losses, shrinking as (1 − t)²
BY_EXCESS, BY_RISE = 2, 2  # how many tasks constrain a step: the highest above their ceilings, the fastest rising
FEASIBLE = 1e-9  # how exactly a constraint is met, against its own size
SMALLEST = 1e-300  # keeps the scale of the constraints positive where every gradient is 0

# A gradient g_j and its budget b_j: g_j·v ≤ b_j.
Constraint = tuple[Tensor, float]


@dataclass(frozen=True)
class Ceilings:
    """Lmax_j(t) = (1 − t)L_j(θ0) + tL_j(θ1) + 0.08(1 − t)²."""

    start: Mapping[str, float]
    target: Mapping[str, float]

    def at(self, task: str, t: float) -> float:
        return (1 - t) * self.start[task] + t * self.target[task] + SLACK * (1 - t) ** 2

    def hold(self, losses: Mapping[str, float], t: float) -> bool:
        """Whether no task is above its ceiling."""
        return all(loss <= self.at(task, t) for task, loss in losses.items())


@dataclass(frozen=True)
class _Candidate:
    """A task that may constrain the step: how far it is above its ceiling, and how fast the transport raises it."""

    excess: float
    rise: float
    constraint: Constraint


@dataclass(kw_only=True)
class GuardedField(Field):
    """v = argmin ½‖v − v0‖² subject to g_j·v ≤ min((Lmax_j(t+h) − L_j)/h, 0), v0 being transport and guidance.

    At most four tasks constrain it: two with the largest excess over Lmax, two with the largest g_j·u.

    Deviates: the released code gives up silently when the constraints have no solution; here that is counted.
    """

    ceilings: Ceilings
    stops: Stops
    step: float
    constrains: bool = True
    _constraints: list[Constraint] = field(default_factory=list[Constraint], init=False)

    def slope(self, t: float) -> Slope:
        """The guided transport v0; leaves the constraints of the most urgent tasks for `velocity`."""
        flat, alpha, h = self.flat, scheduler(t), self.stops.step_from(t, self.step)
        total = torch.zeros_like(flat.grad)
        value, urgent = 0.0, list[_Candidate]()
        for share, task, loss in task_gradients(flat, self.loss):
            value += share * loss
            length = math.sqrt(flat.square(flat.grad))
            total.add_(flat.grad, alpha=equalised(share, length, self.task_norm))
            ceiling = self.ceilings.at(task.task, t + h)
            rise = alpha * flat.gap_products(flat.grad)[0]
            budget = min((ceiling - loss) / h, 0.0)
            urgent = _most_urgent([*urgent, _Candidate(loss - ceiling, rise, (flat.grad.clone(), budget))])
        self._constraints = [candidate.constraint for candidate in urgent]
        return self.guided(t, value, total)

    def velocity(self, here: Slope) -> Tensor:
        """v0 moved to the nearest velocity that the constraints allow; where none is, v0 itself."""
        v = super().velocity(here)
        if self.constrains and not project(v, self._constraints, self.flat.team):
            self.infeasible += 1
        self._constraints = []
        return v


def _most_urgent(tasks: Sequence[_Candidate]) -> list[_Candidate]:
    """The tasks highest above their ceilings, and those whose loss the transport raises most."""
    by_excess = sorted(range(len(tasks)), key=lambda i: -tasks[i].excess)[:BY_EXCESS]
    by_rise = sorted((i for i in range(len(tasks)) if tasks[i].rise > 0), key=lambda i: -tasks[i].rise)[:BY_RISE]
    return [tasks[i] for i in dict.fromkeys([*by_excess, *by_rise])]


def project(v: Tensor, constraints: Sequence[Constraint], team: Team = ALONE) -> bool:
    """Project v onto {g_j·v ≤ b_j}, exactly: the right active set is found among at most sixteen; False when there is none."""
    if not constraints:
        return True
    gradients = [g for g, _ in constraints]
    gram = torch.tensor([[inner(a, b, team) for b in gradients] for a in gradients], dtype=torch.float64)
    excess = torch.tensor([inner(g, v, team) - budget for g, budget in constraints], dtype=torch.float64)
    multipliers = _multipliers(gram, excess)
    if multipliers is None:
        return False
    for g, multiplier in zip(gradients, multipliers, strict=True):
        v.add_(g, alpha=-multiplier)
    return True


def _multipliers(gram: Tensor, excess: Tensor) -> list[float] | None:
    """The multipliers λ ≥ 0 with Gλ ≥ excess, and equal where λ > 0; None when no active set has them."""
    count = len(excess)
    room = FEASIBLE * float(gram.diagonal().max().clamp_min(SMALLEST)) + FEASIBLE * excess.abs()
    for size in range(count + 1):
        for active in itertools.combinations(range(count), size):
            multipliers = torch.zeros(count, dtype=torch.float64)
            if active:
                index = list(active)
                block = gram[index][:, index]
                if _rank(block) < size:
                    continue
                multipliers[index] = _solve(block, excess[index])
            left = excess - gram @ multipliers
            if bool((multipliers >= 0).all()) and bool((left <= room).all()):
                return [float(m) for m in multipliers]
    return None


def _rank(block: Tensor) -> int:
    return int(cast("Tensor", torch.linalg.matrix_rank(block, hermitian=True)))  # pyright: ignore[reportUnknownMemberType]


def _solve(block: Tensor, right: Tensor) -> Tensor:
    return cast("Tensor", torch.linalg.solve(block, right))  # pyright: ignore[reportUnknownMemberType]
