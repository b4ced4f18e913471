"""The mechanisms of the authors' released code, which are not in the paper: a barrier for each task, and a last refinement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mergeway.core.ranks import team
from mergeway.errors import OptionError
from mergeway.rules.ode.controller import landed, next_step
from mergeway.rules.ode.field import Field, Slope
from mergeway.rules.ode.flat import FlatParams, gap_products, products

if TYPE_CHECKING:
    from mergeway.rules.ode.path import Trajectory

SLACK = 0.08  # what a task may rise above the line between its end losses, shrinking as (1 − t)²
SHRINK, TRIES = 0.7, 8  # backtracking
RADIUS = 1e-3  # of the refinement's trust region, against ‖θ‖


class Ceilings:
    """Lmax_j(t) = (1 − t)L_j(θ0) + tL_j(θ1) + 0.08(1 − t)²."""

    def __init__(self, start: Mapping[str, float], target: Mapping[str, float]) -> None:
        self._start, self._target = start, target

    def at(self, task: str, t: float) -> float:
        return (1 - t) * self._start[task] + t * self._target[task] + SLACK * (1 - t) ** 2


def per_task_steps(walk: Field, made: Trajectory, step: float) -> None:
    """Euler steps under a barrier for each task.

    v = argmin ½‖v − v0‖² subject to g_j·v ≤ min((Lmax_j(t+h) − L_j)/h, 0) for at most four tasks (two with the largest
    excess, two with the largest g_j·u), v0 being transport and guidance; then the step is shortened by 0.7 up to eight times
    until every task's loss is below its ceiling, else it is not taken.

    Deviates: the released code gives up silently when the constraints have no solution; here that is counted.
    """
    flat, loss = walk.flat, walk.loss
    if not hasattr(loss, "task_losses"):
        raise OptionError("barrier=per-task needs per-task losses; the objective must be a mergeway Objective")
    objective: Any = loss
    start = objective.task_losses(flat.params)
    ceilings = Ceilings(start, flat.at_target(lambda: objective.task_losses(flat.params)))
    made.probes += 2
    t = 0.0
    while t < made.until:
        h = next_step(t, step, made.next_stop(t))
        slope, held = _look(walk, objective, ceilings, t, h)
        made.note(slope, flat)
        v = flat.velocity_into(flat.spare, slope.along, slope.across)
        if not _protect(v, held):
            made.infeasible += 1
        flat.theta.add_(v, alpha=h)
        taken = h
        for attempt in range(TRIES + 1):
            made.probes += 1
            if all(value <= ceilings.at(task, t + h) for task, value in objective.task_losses(flat.params).items()):
                break
            shorter = taken * SHRINK if attempt < TRIES else 0.0
            flat.theta.add_(v, alpha=shorter - taken)
            taken = shorter
            made.shortened += 1
        t = landed(t, h, made)


def _look(
    walk: Field, objective: Any, ceilings: Ceilings, t: float, h: float
) -> tuple[Slope, list[tuple[Tensor, float]]]:
    """The guided field, and the gradients and budgets of the tasks that constrain it."""
    flat = walk.flat
    alpha = 1.0 / (1.0 - t)
    total = torch.zeros_like(flat.grad)
    value, seen = 0.0, []
    for share, task in zip(objective.shares, objective.tasks, strict=True):
        flat.grad.zero_()
        task_loss = objective.accumulate_task(flat.params, task)
        value += share * task_loss
        length = math.sqrt(products((flat.grad, flat.grad))[0])
        total.add_(flat.grad, alpha=share / length**walk.task_norm if length > 0 else 0.0)
        ceiling = ceilings.at(task.task, t + h)
        rise = alpha * gap_products(flat, flat.grad)[0]
        seen.append((task_loss - ceiling, rise, flat.grad.clone(), min((ceiling - task_loss) / h, 0.0)))
        seen = _most_urgent(seen)
    walk.evaluations += 1
    walk.check_finite(value, t)
    flat.grad.copy_(total)
    r_g, r_r = gap_products(flat, flat.grad)
    norm = math.sqrt(products((flat.grad, flat.grad))[0])
    across = -walk.guidance * alpha * math.sqrt(r_r) / norm if norm > 0 else 0.0
    alignment = abs(r_g) / (math.sqrt(r_r) * norm) if norm > 0 and r_r > 0 else 0.0
    return Slope(t, value, 1.0, alignment, math.sqrt(r_r), alpha, across), [(g, budget) for _, _, g, budget in seen]


def _most_urgent(seen: list[tuple]) -> list[tuple]:
    """At most four tasks: the two highest above their ceilings, and the two whose loss the transport raises most."""
    by_excess = sorted(range(len(seen)), key=lambda i: -seen[i][0])[:2]
    by_rise = sorted((i for i in range(len(seen)) if seen[i][1] > 0), key=lambda i: -seen[i][1])[:2]
    return [seen[i] for i in dict.fromkeys([*by_excess, *by_rise])]


def _protect(v: Tensor, held: list[tuple[Tensor, float]]) -> bool:
    """Project v onto {g_j·v ≤ b_j}, exactly: the right active set is found among at most sixteen; False when there is none."""
    if not held:
        return True
    gradients = [g for g, _ in held]
    gram = torch.tensor([[products((a, b))[0] for b in gradients] for a in gradients], dtype=torch.float64)
    excess = torch.tensor([products((g, v))[0] - budget for g, budget in held], dtype=torch.float64)
    scale = float(gram.diagonal().max().clamp_min(1e-300))
    for size in range(len(held) + 1):
        for active in itertools.combinations(range(len(held)), size):
            multipliers = torch.zeros(len(held), dtype=torch.float64)
            if active:
                index = list(active)
                block = gram[index][:, index]
                if float(torch.linalg.matrix_rank(block, hermitian=True)) < size:
                    continue
                multipliers[index] = torch.linalg.solve(block, excess[index])
            left = excess - gram @ multipliers
            if bool((multipliers >= 0).all()) and bool((left <= 1e-9 * scale + 1e-9 * excess.abs()).all()):
                for g, m in zip(gradients, multipliers.tolist(), strict=True):
                    v.add_(g, alpha=-m)
                return True
    return False


def refine(
    params: Mapping[str, Tensor], objective: Any, steps: int, lr: float = 1e-6
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """AdamW on the calibration samples, kept within 10⁻³‖θ‖ of where it started."""
    flat = FlatParams(params, {n: p + 1 if p.is_floating_point() else p for n, p in params.items()})
    origin = flat.theta.clone()
    radius = RADIUS * math.sqrt(products((origin, origin))[0])
    weights = flat.theta.detach().requires_grad_()
    weights.grad = flat.grad
    adam = torch.optim.AdamW([weights], lr=lr)
    losses = []
    for _ in range(steps):
        losses.append(flat.gradient(objective))
        adam.step()
        with torch.no_grad():
            moved = math.sqrt(team().add_up([float((flat.theta - origin).double().square().sum())])[0])
            if moved > radius:
                flat.theta.copy_(torch.lerp(origin, flat.theta, radius / moved))
    losses.append(flat.value(objective))
    return flat.release(), {"steps": steps, "losses": losses, "radius": radius}
