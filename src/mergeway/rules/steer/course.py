"""A course of lessons: how often a model is taught, at which rates, and how much of it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import torch

from mergeway.calibration.batches import rows_in_a_batch
from mergeway.calibration.objective import Objective
from mergeway.core.progress import SILENT, Progress
from mergeway.rules.rule import Params
from mergeway.rules.steer.directions import Directions
from mergeway.rules.steer.lesson import Lesson
from mergeway.rules.steer.looks import is_clearly_lower

PARTS = (0.5, 0.25, 0.125, 0.0)  # of a lesson that may be kept instead of all of it
ENOUGH = 0.5  # if less than this of a lesson is kept, it did harm and is taken again
TRIES = 3  # at the rates, at a third and at a ninth of them
LOWER = 3.0


class Taught(NamedTuple):
    """How a lesson ended: how much of it is kept, how often its rates were divided by three, the loss of what is kept on what nobody
    was taught, and the loss of every batch."""

    kept: float
    slower: int
    loss: float
    losses: list[float]


@dataclass(frozen=True)
class Course:
    """How a model is taught: from where, in which directions, in how many steps of how many samples, and at which rates at the most."""

    begin: Callable[[], Params]
    directions: Directions
    steps: int
    batch: int
    rate: float
    weight_rate: float
    doubt: float
    progress: Progress = SILENT

    def teach(self, loss: Objective, glance: Callable[[Params], float], slower: int) -> tuple[Params, Taught, int]:
        """The model and how it was taught by the best of at most three lessons, each at a third of the rates of the one before, and how
        many lessons that took.

        What overshoots, or learns samples by heart, at one rate may learn from them at a lower one. A lesson of which at least half
        is kept is the last. If the best was an earlier one, it is given again: to keep its model meanwhile would take more memory than a lesson.
        """
        model, best = self._lesson(loss, glance, slower)
        last, lessons = best, 1
        while last.kept < ENOUGH and last.slower + 1 < TRIES:
            del model
            model, last = self._lesson(loss, glance, last.slower + 1)
            best, lessons = min(best, last, key=attrgetter("loss")), lessons + 1
        if best is not last and best.kept:
            del model
            end, _ = self._end(loss, best.slower)
            model, lessons = _between(self.begin(), end, best.kept), lessons + 1
        return (model if best.kept else self.begin()), best, lessons

    def _lesson(self, loss: Objective, glance: Callable[[Params], float], slower: int) -> tuple[Params, Taught]:
        """All of one lesson, or a half, .. or nothing of it where that is clearly better: what was learned by heart is worth less."""
        end, losses = self._end(loss, slower)
        start = self.begin()

        def keep(share: float) -> Taught:
            return Taught(share, slower, glance(_between(start, end, share)), losses)

        whole, part = keep(1.0), min((keep(share) for share in PARTS), key=attrgetter("loss"))
        taught = part if is_clearly_lower(part.loss, whole.loss, self.doubt) else whole
        return _between(start, end, taught.kept), taught

    def _end(self, loss: Objective, slower: int) -> tuple[Params, list[float]]:
        """Where a lesson leads, and the loss of its batches; the same each time it is given."""
        rates = self.rate / LOWER**slower, self.weight_rate / LOWER**slower
        lesson = Lesson(self.begin(), self.directions, *rates, self.progress)
        losses = lesson.attend(loss, self.steps, self.batch)
        return lesson.end(), losses


def _between(start: Params, end: Params, share: float) -> Params:
    """That share of the way from the start of a lesson to its end; nothing of it is the start, whatever the end is."""
    if share == 0:
        return start
    return end if share == 1 else {n: torch.lerp(start[n], end[n], share) for n in end}


def share_of_gradient(batch: int, objective: Objective) -> float:
    """What a batch costs against one gradient over all samples; a function of your own is all there is."""
    samples = sum(len(task) for task in objective.tasks)
    return rows_in_a_batch(objective.tasks, batch) / samples if samples else 1.0
