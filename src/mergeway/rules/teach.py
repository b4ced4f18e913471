"""Teaching a model in small batches: Adam on the gains of its directions and on every weight that an arrival has moved."""

from __future__ import annotations

from math import cos, pi

import torch
from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.rules.directions import Directions
from mergeway.rules.rule import Params

WARM_UP = 0.05  # share of the steps in which the rates rise


def teach(
    start: Params, flat: Directions, loss: Objective, steps: int, batch: int, rate: float, weight_rate: float
) -> tuple[Params, list[float]]:
    """The model after so many steps, and the loss of every batch before its step."""
    if not flat.names:  # every arrival so far is the base
        return start, []
    gains = {n: g.requires_grad_() for n, g in flat.gains(0.0).items()}
    weights = {n: torch.zeros_like(start[n]).requires_grad_() for n in flat.names}
    groups = [{"params": [*gains.values()], "lr": rate}, {"params": [*weights.values()], "lr": weight_rate}]
    adam = torch.optim.Adam(groups, eps=1e-12)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: _share_of_rate(step, steps))
    losses: list[float] = []
    for rows in loss.batches(steps, batch):
        leaves = _moved(start, flat, gains, weights)
        for n in flat.names:
            leaves[n].requires_grad_()
        losses.append(loss.accumulate_batch(leaves, rows))
        gradients = {n: _gradient(leaves[n]) for n in flat.names}
        for n, gradient in flat.of_gains(gradients).items():
            gains[n].grad, weights[n].grad = gradient, gradients[n]
        adam.step()  # pyright: ignore[reportUnknownMemberType]
        decay.step()
    return _moved(start, flat, gains, weights), losses


def _moved(start: Params, flat: Directions, gains: Params, weights: Params) -> Params:
    with torch.no_grad():
        return {n: t + weights[n] if n in weights else t for n, t in flat.added(start, gains).items()}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _share_of_rate(step: int, steps: int) -> float:
    """A short rise, then a cosine's fall to zero."""
    return min(1.0, (step + 1) / max(1.0, WARM_UP * steps)) * 0.5 * (1 + cos(pi * step / max(1, steps)))
