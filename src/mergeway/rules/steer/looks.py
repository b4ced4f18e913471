"""How a model is looked at without being taught: the loss on samples that are the same each time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mergeway.calibration.objective import Objective
from mergeway.rules.rule import Params

ENOUGH = 8  # samples of a task that can tell whether another rate would be better
GLANCE = 256  # samples and copies on which a model is looked at without being taught


def glance_at(loss: Objective) -> Callable[[Params], float]:
    """The loss on one batch of samples and copies, always the same one, without gradients."""
    rows = next(iter(loss.batches(1, GLANCE)))

    def glance(params: Params) -> float:
        with torch.no_grad():
            return loss.accumulate_batch(params, rows)

    return glance


def looks_at(loss: Objective) -> list[Callable[[Params], float]]:
    """The loss of the task that came last, and that of all; a function of your own knows no tasks, and is looked at whole.

    None where the newest task has too few samples to tell anything: then the others, which have been taught before, would decide.
    """
    if loss.tasks and len(loss.tasks[-1]) < ENOUGH:
        return []

    def newest(params: Params) -> float:
        with torch.no_grad():
            return loss.accumulate_task(params, loss.tasks[-1])

    return [*([newest] if loss.tasks else []), glance_at(loss)]
