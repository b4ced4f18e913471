"""Gradients task by task: equalised lengths (`task_norm`) and the diagonal second moment."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mergeway.calibration.objective import Objective
from mergeway.calibration.samples import Samples
from mergeway.errors import OptionError
from mergeway.rules.ode.flat import FlatParams


def task_gradients(flat: FlatParams, loss: Objective) -> Iterator[tuple[float, Samples, float]]:
    """Share, samples and loss of one task after the other, with that task's g_j in `grad`."""
    if not loss.tasks:
        raise OptionError(
            "task_norm and metric=diagonal need per-task gradients; the objective must be a mergeway Objective"
        )
    for share, task in zip(loss.shares, loss.tasks, strict=True):
        flat.grad.zero_()
        yield share, task, loss.accumulate_task(flat.params, task)


def equalised(share: float, length: float, task_norm: float) -> float:
    """w_j/‖g_j‖^p, the weight of a task's gradient; one that has none counts for nothing."""
    return share / length**task_norm if length > 0 else 0.0


def combined_gradient(flat: FlatParams, loss: Objective, task_norm: float, diagonal: bool) -> float:
    """Σ_j w_j g_j/‖g_j‖^p / Σ_j w_j in `grad`, the mean of g_j² in `moments`; the loss is the objective's own.

    p = 0 is the plain mean; the released code uses p = 0.25 (its equation 2 of the field).
    """
    count = len(loss.tasks)
    total = torch.zeros_like(flat.grad)
    moments = flat.moments.zero_() if diagonal else None
    value = 0.0
    for share, _, task_loss in task_gradients(flat, loss):
        value += share * task_loss
        total.add_(flat.grad, alpha=equalised(share, flat.square(flat.grad) ** 0.5, task_norm))
        if moments is not None:
            moments.addcmul_(flat.grad, flat.grad, value=1.0 / count)
    flat.grad.copy_(total)
    return value
