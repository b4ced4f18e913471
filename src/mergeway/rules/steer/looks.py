"""How a model is looked at without being taught: the loss on samples that are the same each time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mergeway.calibration.objective import Objective
from mergeway.rules.rule import Params

GLANCE = 256  # samples and copies on which a model is looked at without being taught


def glance_at(loss: Objective) -> Callable[[Params], float]:
    """The loss on one batch of samples and copies, always the same one, without gradients."""
    rows = next(iter(loss.batches(1, GLANCE)))

    def glance(params: Params) -> float:
        with torch.no_grad():
            return loss.accumulate_batch(params, rows)

    return glance


def is_clearly_lower(one: float, other: float, loss: Objective) -> bool:
    """Whether it is lower by more than n samples cannot tell."""
    return one * _margin(loss) < other


def is_clearly_higher(one: float, other: float, loss: Objective) -> bool:
    """Whether it is higher by more than n samples cannot tell; what is no number is."""
    return not one <= other * _margin(loss)


def _margin(loss: Objective) -> float:
    """One part in √n is what n samples cannot tell; a function can tell all."""
    samples = sum(len(task) for task in loss.tasks)
    return 1 + (1 / math.sqrt(samples) if samples else 0.0)
