"""How a model is looked at without being taught: the loss on samples that are the same each time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mergeway.calibration.batches import DOCUMENT
from mergeway.calibration.objective import Objective
from mergeway.rules.rule import Params

SURE = 2.0  # times what n samples cannot tell: a taught model that is worse by that than a plain merge is forgotten
FEWEST = 8  # samples of a task: seven to teach and one to judge; fewer teach little, and judge it too kindly
GLANCE = 256  # samples and copies on which a model is looked at without being taught


def glance_at(loss: Objective) -> Callable[[Params], float]:
    """The loss on one batch of samples and copies, always the same one, without gradients; infinite where it is no number."""
    rows = next(iter(loss.batches(1, GLANCE)))

    def glance(params: Params) -> float:
        with torch.no_grad():
            found = loss.accumulate_batch(params, rows)
        return math.inf if math.isnan(found) else found

    return glance


def too_few(loss: Objective) -> int:
    """How many samples the smallest task has, if those are too few to be taught by; otherwise 0. A function is all there is."""
    counts = (len(task) for task in loss.tasks if len(task) * (DOCUMENT if task.documents else 1) < FEWEST)
    return min(counts, default=0)


def doubt_of(loss: Objective) -> float:
    """One part in √n is what n samples cannot tell; a function can tell all."""
    samples = sum(len(task) for task in loss.tasks)
    return 1 / math.sqrt(samples) if samples else 0.0


def is_clearly_lower(one: float, other: float, doubt: float) -> bool:
    """Whether a loss is lower than another by more than the samples cannot tell."""
    return one + doubt * abs(one) < other
