"""Teaching a model in small batches: Adam on the gains of its directions and on every weight that an arrival has moved."""

from __future__ import annotations

from math import cos, pi

import torch

from mergeway.calibration.objective import Objective
from mergeway.rules.directions import Directions
from mergeway.rules.rule import Params

WARM_UP = 0.05  # share of the steps in which the rates rise


def teach(
    start: Params, directions: Directions, loss: Objective, steps: int, batch: int, rate: float, weight_rate: float
) -> tuple[Params, list[float]]:
    """The model after so many steps, and the loss of every batch before its step; what moves of `start` is moved in place."""
    moving = directions.names
    if not moving:  # every arrival so far is the base
        return start, []
    model = {n: t.requires_grad_(n in directions.left) for n, t in start.items()}
    gains = directions.gains(0.0)
    groups = [{"params": [*gains.values()], "lr": rate}, {"params": [model[n] for n in moving], "lr": weight_rate}]
    adam = torch.optim.Adam(groups, eps=1e-12)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: _share_of_rate(step, steps))
    losses: list[float] = []
    for rows in loss.batches(steps, batch):
        adam.zero_grad(set_to_none=False)
        losses.append(loss.accumulate_batch(model, rows))
        gradients = {n: _gradient(model[n]) for n in moving}
        before = {n: g.clone() for n, g in gains.items()}
        for n, gradient in directions.of_gains(gradients).items():
            gains[n].grad = gradient
        adam.step()  # pyright: ignore[reportUnknownMemberType]
        decay.step()
        # Adam has moved the weights themselves; what the gains have gained is added to them.
        directions.add_to(model, {n: g - before[n] for n, g in gains.items()})
    return {n: t.detach() for n, t in model.items()}, losses


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.grad is None:
        leaf.grad = torch.zeros_like(leaf)
    return leaf.grad


def _share_of_rate(step: int, steps: int) -> float:
    """A short rise, then a cosine's fall to zero."""
    return min(1.0, (step + 1) / max(1.0, WARM_UP * steps)) * 0.5 * (1 + cos(pi * step / max(1, steps)))
