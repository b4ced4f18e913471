"""One lesson in small batches: Adam on the gains of the directions and on every weight that an arrival has moved."""

from __future__ import annotations

from math import cos, pi

import torch

from mergeway.calibration.objective import Objective
from mergeway.core.pool import return_freed_blocks
from mergeway.core.progress import SILENT, Progress
from mergeway.rules.rule import Params
from mergeway.rules.steer.directions import Directions

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
        self._gradients = {n: torch.zeros_like(weight) for n, weight in self._moving.items()}
        for n, weight in self._moving.items():
            weight.grad = self._gradients[n]
        groups = [
            {"params": [*self._gains.values()], "lr": rate},
            {"params": [*self._moving.values()], "lr": weight_rate},
        ]
        # Without a direction every arrival so far is the base, and there is nothing to move.
        self._adam = torch.optim.Adam(groups, eps=1e-12, fused=True) if self._moving else None
        self._rates, self._progress = (rate, weight_rate), progress

    def attend(self, loss: Objective, steps: int, batch: int) -> list[float]:
        """The steps, each on a batch of this loss; the loss of each batch before its step."""
        losses: list[float] = []
        if self._adam is None:
            return losses
        return_freed_blocks()  # Adam's moments, which come with the first step, do not fit where others were
        self._progress.begin("teaching", steps, "steps")
        for rows in loss.batches(steps, batch):
            for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
                group["lr"] = rate * _share_of_rate(len(losses), steps)
            for gradient in self._gradients.values():
                gradient.zero_()
            losses.append(loss.accumulate_batch(self.model, rows))
            self._progress.describe(f"teaching, loss {losses[-1]:.3f}")
            self._progress.advance(1)
            before = {n: g.clone() for n, g in self._gains.items()}
            with loss.precision:
                for n, gradient in self._directions.of_gains(self._gradients).items():
                    self._gains[n].grad = gradient
                self._adam.step()  # pyright: ignore[reportUnknownMemberType]
                # Adam has moved the weights themselves; what the gains have gained is added to them.
                self._directions.add_to(self.model, {n: g - before[n] for n, g in self._gains.items()})
        return losses

    def end(self) -> Params:
        """The model as it was taught."""
        return {n: t.detach() for n, t in self.model.items()}


def _share_of_rate(step: int, steps: int) -> float:
    """A short rise, then a cosine's fall to zero."""
    return min(1.0, (step + 1) / max(LEAST_WARM_UP, WARM_UP * steps)) * 0.5 * (1 + cos(pi * step / max(1, steps)))
