"""Teaching a model in small batches: Adam on the gains of its directions and on every weight that an arrival has moved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import cos, pi
from typing import NamedTuple

import torch

from mergeway.calibration.batches import rows_in_a_batch
from mergeway.calibration.objective import Objective
from mergeway.core.progress import SILENT, Progress
from mergeway.rules.rule import Params
from mergeway.rules.steer.directions import Directions

TRIES = 3  # at the rates, at a third and at a ninth of them
LOWER = 3.0
WARM_UP = 0.05  # share of the steps in which the rates rise
LEAST_WARM_UP = 8  # steps: Adam's first ones move every weight by the whole rate


class Lesson:
    """A course of `steps` in which a model is taught in place, with one fall of the rates over all of it."""

    def __init__(
        self,
        model: Params,
        directions: Directions,
        steps: int,
        rate: float,
        weight_rate: float,
        progress: Progress = SILENT,
    ) -> None:
        self.model, self.losses = model, list[float]()
        self._directions, self._gains = directions, directions.gains(0.0)
        self._moving = {n: model[n].requires_grad_() for n in directions.names}
        groups = [
            {"params": [*self._gains.values()], "lr": rate},
            {"params": [*self._moving.values()], "lr": weight_rate},
        ]
        # Without a direction every arrival so far is the base, and there is nothing to move.
        self._adam = torch.optim.Adam(groups, eps=1e-12) if self._moving else None
        self._rates, self._steps, self._progress = (rate, weight_rate), steps, progress
        progress.begin("teaching", steps, "steps")

    def attend(self, loss: Objective, count: int, batch: int) -> None:
        """The next `count` steps of the course, each on a batch of this loss; `losses` has that of each before its step."""
        if self._adam is None:
            return
        for rows in loss.batches(count, batch, seed=len(self.losses)):
            for group, rate in zip(self._adam.param_groups, self._rates, strict=True):
                group["lr"] = rate * _share_of_rate(len(self.losses), self._steps)
            self._adam.zero_grad(set_to_none=False)
            self.losses.append(loss.accumulate_batch(self.model, rows))
            self._progress.describe(f"teaching, loss {self.losses[-1]:.3f}")
            self._progress.advance(1)
            gradients = {n: _gradient(weight) for n, weight in self._moving.items()}
            before = {n: g.clone() for n, g in self._gains.items()}
            for n, gradient in self._directions.of_gains(gradients).items():
                self._gains[n].grad = gradient
            self._adam.step()  # pyright: ignore[reportUnknownMemberType]
            # Adam has moved the weights themselves; what the gains have gained is added to them.
            self._directions.add_to(self.model, {n: g - before[n] for n, g in self._gains.items()})

    def end(self) -> Params:
        """The model as it was taught."""
        return {n: t.detach() for n, t in self.model.items()}


@dataclass(frozen=True)
class Course:
    """How a model is taught: in which directions, in how many steps of how many samples, and at which rates at the most."""

    directions: Directions
    steps: int
    batch: int
    rate: float
    weight_rate: float
    progress: Progress = SILENT

    def first_half(
        self, begin: Callable[[], Params], fit: Objective, unseen: Sequence[Callable[[Params], float]], share: float
    ) -> Half:
        """Half of the steps on `fit`, at the highest share of the rates at which one of the losses on what it does not see falls.

        What learns samples by heart at one rate may learn from them at a lower one.
        """
        before, spent, tries = [look(begin()) for look in unseen], 0, 0
        while True:
            rates = share * self.rate, share * self.weight_rate
            lesson = Lesson(begin(), self.directions, self.steps, *rates, self.progress)
            lesson.attend(fit, self.steps - self.steps // 2, self.batch)
            spent, tries = spent + len(lesson.losses), tries + 1
            helped = not unseen or any(look(lesson.model) <= b for look, b in zip(unseen, before, strict=True))
            if helped or tries == TRIES:
                return Half(lesson, helped, share, spent)
            del lesson  # its model, gradients and moments, before there are others
            share /= LOWER


class Half(NamedTuple):
    """A lesson after its first half, whether it helped, at which share of the rates, and how many steps were spent on all tries."""

    lesson: Lesson
    helped: bool
    share: float
    spent: int


def next_share(facts: Mapping[str, float]) -> float:
    """Where the search for a share begins: one try above that of the fold before, of all rates in the first."""
    return min(1.0, LOWER * max(facts.get("share", 1.0), LOWER ** (1 - TRIES)))


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
