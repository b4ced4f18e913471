"""The last refinement as ODE-M's released code has it: AdamW by batches, anchored, clipped, and only the best snapshot kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mergeway.calibration.objective import Loss, as_objective
from mergeway.calibration.samples import Samples
from mergeway.core.ranks import ALONE, Team
from mergeway.errors import OptionError
from mergeway.rules.ode.refine import RADIUS, RATE, every_parameter, keep_within, refine
from mergeway.rules.ode.released import BATCH, batch_losses

ANCHOR = 1e-3  # what ‖θ − θ_start‖²/‖θ_start‖² counts in the loss
CLIP = 1.0  # the longest gradient
TASK_TOLERANCE = 0.02  # what a task's loss may rise above that at the start
PROBED = 4  # batches of a task that a snapshot is judged on


def refine_as_released(
    params: Mapping[str, Tensor], loss: Loss, steps: int, lr: float = RATE, team: Team = ALONE
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Each step takes one shuffled batch of every task; the snapshot with the lowest loss that spares every task is what is kept."""
    objective = as_objective(loss)
    if not objective.tasks:
        raise OptionError("refine_by=released needs per-task losses; the objective must be a mergeway Objective")
    flat = every_parameter(params, team)
    origin = flat.theta.clone()
    size = flat.square(origin)
    weights = flat.theta.detach().requires_grad_()
    weights.grad = flat.grad
    adam = torch.optim.AdamW([weights], lr=lr, weight_decay=0.0)
    before = batch_losses(objective, flat.params, PROBED)
    best, lowest, losses = origin.clone(), _mean(before), [_mean(before)]
    turns = [_shuffled(task, number) for number, task in enumerate(objective.tasks)]
    for _ in range(steps):
        flat.grad.zero_()
        for share, turn in zip(objective.shares, turns, strict=True):
            objective.accumulate_task(flat.params, next(turn), share)
        with torch.no_grad():
            flat.grad.add_(flat.theta - origin, alpha=2 * ANCHOR / size)
            flat.grad.mul_(min(1.0, CLIP / (math.sqrt(flat.square(flat.grad)) + 1e-6)))
        adam.step()  # pyright: ignore[reportUnknownMemberType]
        keep_within(flat, origin, RADIUS * math.sqrt(size))
        now = batch_losses(objective, flat.params, PROBED)
        losses.append(_mean(now))
        if losses[-1] < lowest and all(now[task] <= before[task] + TASK_TOLERANCE for task in now):
            lowest = losses[-1]
            best.copy_(flat.theta.detach())
    with torch.no_grad():
        flat.theta.copy_(best)
    return flat.release(), {"steps": steps, "losses": losses, "kept": lowest, "radius": RADIUS * math.sqrt(size)}


REFINEMENTS = {"plain": refine, "released": refine_as_released}


def _mean(losses: Mapping[str, float]) -> float:
    return sum(losses.values()) / len(losses)


def _shuffled(task: Samples, seed: int) -> Iterator[Samples]:
    """Batches of a task without end, every pass shuffled anew."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(task), generator=generator)
        for start in range(0, len(order), BATCH):
            yield task.rows(order[start : start + BATCH])
