"""Teaching a model in small batches: Adam on the gains of its directions and on every weight that an arrival has moved."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, inf, isnan, pi
from typing import NamedTuple

import torch

from mergeway.calibration.batches import rows_in_a_batch
from mergeway.calibration.objective import Objective
from mergeway.core.progress import SILENT, Progress
from mergeway.rules.rule import Params
from mergeway.rules.steer.directions import Directions

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0)  # of a lesson that may be kept
WARM_UP = 0.05  # share of the steps in which the rates rise
LEAST_WARM_UP = 8  # steps: Adam's first ones move every weight by the whole rate


class Lesson:
    """A model that is taught in place: how, at which rates, and the optimiser that does it."""

    def __init__(
        self,
        model: Params,
        directions: Directions,
        rate: float,
        weight_rate: float,
        progress: Progress = SILENT,
    ) -> None:
        self.model = model
        self._directions, self._gains = directions, directions.gains(0.0)
        self._moving = {n: model[n].requires_grad_() for n in directions.names}
        groups = [
            {"params": [*self._gains.values()], "lr": rate},
            {"params": [*self._moving.values()], "lr": weight_rate},
        ]
        # Without a direction every arrival so far is the base, and there is nothing to move.
        self._adam = torch.optim.Adam(groups, eps=1e-12) if self._moving else None
        self._rates, self._progress = (rate, weight_rate), progress

    def attend(self, loss: Objective, steps: int, batch: int) -> list[float]:
        """The steps, each on a batch of this loss; the loss of each batch before its step."""
        losses: list[float] = []
        if self._adam is None:
            return losses
        self._progress.begin("teaching", steps, "steps")
        for rows in loss.batches(steps, batch):
            for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
                group["lr"] = rate * _share_of_rate(len(losses), steps)
            self._adam.zero_grad(set_to_none=False)
            losses.append(loss.accumulate_batch(self.model, rows))
            self._progress.describe(f"teaching, loss {losses[-1]:.3f}")
            self._progress.advance(1)
            gradients = {n: _gradient(weight) for n, weight in self._moving.items()}
            before = {n: g.clone() for n, g in self._gains.items()}
            for n, gradient in self._directions.of_gains(gradients).items():
                self._gains[n].grad = gradient
            self._adam.step()  # pyright: ignore[reportUnknownMemberType]
            # Adam has moved the weights themselves; what the gains have gained is added to them.
            self._directions.add_to(self.model, {n: g - before[n] for n, g in self._gains.items()})
        return losses

    def end(self) -> Params:
        """The model as it was taught."""
        return {n: t.detach() for n, t in self.model.items()}


class Kept(NamedTuple):
    """A model between the start and the end of a lesson: what of the lesson is in it, and its loss on what nobody was taught."""

    model: Params
    share: float
    loss: float


def keep(start: Params, end: Params, glance: Callable[[Params], float]) -> Kept:
    """The best of all, half, .. and nothing of a lesson: what was learned by heart is worth less on other samples."""

    def at(share: float) -> Kept:
        model = end if share == 1 else {n: torch.lerp(start[n], end[n], share) for n in end}
        return Kept(model, share, glance(model))

    return min((at(share) for share in SHARES), key=lambda kept: inf if isnan(kept.loss) else kept.loss)


def share_of_gradient(batch: int, objective: Objective) -> float:
    """What a batch costs against one gradient over all samples; a function of your own is all there is."""
    samples = sum(len(task) for task in objective.tasks)
    return rows_in_a_batch(objective.tasks, batch) / samples if samples else 1.0


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    if leaf.grad is None:
        leaf.grad = torch.zeros_like(leaf)
    return leaf.grad


def _share_of_rate(step: int, steps: int) -> float:
    """A short rise, then a cosine's fall to zero."""
    return min(1.0, (step + 1) / max(LEAST_WARM_UP, WARM_UP * steps)) * 0.5 * (1 + cos(pi * step / max(1, steps)))
