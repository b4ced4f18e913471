"""How a model is looked at without being taught: the loss on samples that are the same each time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mergeway.calibration.objective import Objective
from mergeway.rules.rule import Params

SURE = 2.0  # times what n samples cannot tell, by which a taught model must be better than a plain merge
GLANCE = 256  # samples and copies on which a model is looked at without being taught


def glance_at(loss: Objective) -> Callable[[Params], float]:
    """The loss on one batch of samples and copies, always the same one, without gradients; infinite where it is no number."""
    rows = next(iter(loss.batches(1, GLANCE)))

    def glance(params: Params) -> float:
        with torch.no_grad():
            found = loss.accumulate_batch(params, rows)
        return math.inf if math.isnan(found) else found

    return glance


def doubt_of(loss: Objective) -> float:
    """One part in √n is what n samples cannot tell; a function can tell all."""
    samples = sum(len(task) for task in loss.tasks)
    return 1 / math.sqrt(samples) if samples else 0.0


def is_clearly_lower(one: float, other: float, doubt: float) -> bool:
    """Whether a loss is lower than another by more than the samples cannot tell."""
    return one + doubt * abs(one) < other
