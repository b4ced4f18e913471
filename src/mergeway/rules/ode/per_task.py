"""Gradients task by task: equalised lengths (`task_norm`) and the diagonal second moment."""

from __future__ import annotations

from typing import Any

import torch

from mergeway.errors import OptionError
from mergeway.rules.ode.flat import FlatParams, Loss, products


def combined_gradient(flat: FlatParams, loss: Loss, task_norm: float, diagonal: bool) -> float:
    """Σ_j w_j g_j/‖g_j‖^p / Σ_j w_j in `grad`, the mean of g_j² in `moments`; the loss is the objective's own.

    p = 0 is the plain mean; the released code uses p = 0.25 (its equation 2 of the field).
    """
    tasks: Any = getattr(loss, "tasks", None)
    if tasks is None:
        raise OptionError(
            "task_norm and metric=diagonal need per-task gradients; the objective must be a mergeway Objective"
        )
    total = torch.zeros_like(flat.grad)
    moments = flat.moments.zero_() if diagonal else None
    value = 0.0
    for share, task in zip(loss.shares, tasks, strict=True):  # type: ignore[attr-defined]
        flat.grad.zero_()
        value += share * loss.accumulate_task(flat.params, task)  # type: ignore[attr-defined]
        length = products((flat.grad, flat.grad))[0] ** 0.5
        total.add_(flat.grad, alpha=share / length**task_norm if length > 0 else 0.0)
        if moments is not None:
            moments.addcmul_(flat.grad, flat.grad, value=1.0 / len(tasks))
    flat.grad.copy_(total)
    return value
