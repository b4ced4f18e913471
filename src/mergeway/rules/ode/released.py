"""The barrier of ODE-M's released code, literally: losses by batch, a ridge in its QP, and no protection where that fails.

The numbers are those of the released configuration. `barrier=per-task` is the same idea solved exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.calibration.samples import Samples
from mergeway.core.ranks import ALONE, Team
from mergeway.rules.ode.barrier import BY_EXCESS, BY_RISE, Ceilings, Constraint
from mergeway.rules.ode.field import Field, Slope, scheduler
from mergeway.rules.ode.flat import inner
from mergeway.rules.ode.stops import Stops
from mergeway.rules.ode.task_gradients import equalised

BATCH = 128  # rows of a batch; a task's loss is the mean over batches, so that a short last one counts as much
PROBED = 8  # batches of a task that are looked at, of losses and of gradients
SCALES = 8  # 1, 0.7, 0.49 …: the steps that are tried
RIDGE, TOLERANCE = 1e-6, 1e-6  # qp_reg on the diagonal, qp_tol on multipliers and on constraints


@dataclass(frozen=True)
class _Candidate:
    excess: float
    rise: float
    gradient: Tensor
    budget: float


def batches(task: Samples, most: int = PROBED) -> Iterator[Samples]:
    """The first batches of a task."""
    for start in itertools.islice(range(0, len(task), BATCH), most):
        yield task.rows(slice(start, start + BATCH))


def batch_losses(loss: Objective, params: Mapping[str, Tensor], most: int = PROBED) -> dict[str, float]:
    """The loss of every task: the mean over its first batches of each one's mean."""
    found: dict[str, float] = {}
    with torch.no_grad():
        for task in loss.tasks:
            values = [loss.accumulate_task(dict(params), rows) for rows in batches(task, most)]
            found[task.task] = sum(values) / len(values)
    return found


@dataclass(kw_only=True)
class ReleasedField(Field):
    """v0 = u − ρ‖u‖·g_M/‖g_M‖, moved by the released QP: constraints of at most four tasks, each from its first batch.

    Two tasks have the largest L_j − Lmax_j(t), two the largest g_j·u above 0. g_M sums a task's batches.

    Deviates: a gradient that the released code works out a second time is kept.
    """

    ceilings: Ceilings
    stops: Stops
    step: float
    _constraints: list[Constraint] = field(default_factory=list[Constraint], init=False)

    def task_losses(self) -> dict[str, float]:
        """The loss of every task at the current θ, by batches."""
        self.probes += 1
        return batch_losses(self.loss, self.flat.params)

    def slope(self, t: float) -> Slope:
        """The guided transport v0; leaves the constraints of the most urgent tasks for `velocity`."""
        flat, alpha, h = self.flat, scheduler(t), self.stops.step_from(t, self.step)
        total = torch.zeros_like(flat.grad)
        value, tasks = 0.0, list[_Candidate]()
        for share, task in zip(self.loss.shares, self.loss.tasks, strict=True):
            loss, first = self._gradients(task)
            value += share * loss
            length = math.sqrt(flat.square(flat.grad))
            total.add_(flat.grad, alpha=equalised(share, length, self.task_norm))
            budget = min((self.ceilings.at(task.task, t + h) - loss) / h, 0.0)
            excess = loss - self.ceilings.at(task.task, t)
            tasks = _most_urgent([*tasks, _Candidate(excess, alpha * flat.gap_products(first)[0], first, budget)])
        self._constraints = [(task.gradient, task.budget) for task in tasks]
        return self.guided(t, value, total)

    def velocity(self, here: Slope) -> Tensor:
        """v0 as the QP leaves it; a solution that it rejects is counted, and the step goes on unprotected."""
        v = super().velocity(here)
        if not ridge_project(v, self._constraints, self.flat.team):
            self.infeasible += 1
        self._constraints = []
        return v

    def _gradients(self, task: Samples) -> tuple[float, Tensor]:
        """A task's loss and the gradient of its first batch; the sum over its batches is left in `grad`."""
        flat = self.flat
        flat.grad.zero_()
        values, first = list[float](), flat.grad
        for number, rows in enumerate(batches(task)):
            values.append(self.loss.accumulate_task(flat.params, rows))
            first = flat.grad.clone() if number == 0 else first
        return sum(values) / len(values), first


def _most_urgent(tasks: Sequence[_Candidate]) -> list[_Candidate]:
    """The tasks highest above their ceilings now, then those whose loss the transport raises most."""
    by_excess = sorted(tasks, key=lambda task: -task.excess)[:BY_EXCESS]
    by_rise = sorted((task for task in tasks if task.rise > 0), key=lambda task: -task.rise)[:BY_RISE]
    return [*by_excess, *(task for task in by_rise if not any(task is other for other in by_excess))]


def ridge_project(v: Tensor, constraints: Sequence[Constraint], team: Team = ALONE) -> bool:
    """Move v by the released QP; False, and v as it was, where every active set is rejected."""
    if not constraints:
        return True
    gradients = [g for g, _ in constraints]
    gram = torch.tensor([[inner(a, b, team) for b in gradients] for a in gradients], dtype=torch.float64)
    excess = torch.tensor([inner(g, v, team) - budget for g, budget in constraints], dtype=torch.float64)
    found = _ridge_multipliers(gram, excess)
    if found is None:
        return False
    for g, multiplier in zip(gradients, found, strict=True):
        v.add_(g, alpha=-float(multiplier))
    return True


def _ridge_multipliers(gram: Tensor, excess: Tensor) -> Tensor | None:
    """Of all active sets whose ridge solution passes, the one that moves least.

    The ridge leaves a binding constraint violated by 10⁻⁶ times its multiplier, and the tolerance is 10⁻⁶ as well: what needs a
    multiplier above 1 is rejected.
    """
    count, best, least = len(excess), None, math.inf
    for size in range(count + 1):
        for active in map(list, itertools.combinations(range(count), size)):
            multipliers = torch.zeros(count, dtype=torch.float64)
            if active:
                block = gram[active][:, active] + RIDGE * torch.eye(size, dtype=torch.float64)
                found = cast("Tensor", torch.linalg.solve(block, excess[active]))  # pyright: ignore[reportUnknownMemberType]
                if bool((found < -TOLERANCE).any()):
                    continue
                multipliers[active] = found.clamp_min(0.0)
            moved = float(multipliers @ gram @ multipliers)
            if bool((excess - gram @ multipliers <= TOLERANCE).all()) and moved < least:
                best, least = multipliers, moved
    return best
