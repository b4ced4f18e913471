"""The objective: the loss of the seen tasks on their calibration samples, as a function of named parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mergeway.calibration.batches import Batch
from mergeway.calibration.function_objective import FunctionObjective
from mergeway.calibration.loss import Predict
from mergeway.calibration.samples import MINIBATCH, Samples
from mergeway.errors import MergewayError
from mergeway.model.inputs import Params


@runtime_checkable
class Objective(Protocol):
    """What a rule may ask of a loss; a function of the user's own knows no tasks, and `as_objective` makes it one of these."""

    @property
    def tasks(self) -> Sequence[Samples]:
        """The samples of each task; empty where the objective knows none."""
        ...

    @property
    def shares(self) -> Sequence[float]:
        """What each task's mean loss counts for; they sum to 1."""
        ...

    @property
    def precision(self) -> AbstractContextManager[object]:
        """The precision of the model's own products, for those that a rule makes beside it in the host's memory."""
        ...

    def __call__(self, params: Params) -> Tensor:
        """The loss of all tasks."""
        ...

    def task_losses(self, params: Params) -> dict[str, float]:
        """The loss of every task, without gradients."""
        ...

    def accumulate(self, params: Params) -> float:
        """The loss; its gradient is added to `.grad` of the parameters."""
        ...

    def accumulate_task(self, params: Params, task: Samples, scale: float = 1.0) -> float:
        """One task's loss on the rows given; `scale` times its gradient is added to `.grad` of the parameters."""
        ...

    def batches(self, count: int, size: int = MINIBATCH, seed: int = 0) -> Iterator[Batch]:
        """Minibatches drawn by a seed: an equal share of samples, or of their copies, from every task."""
        ...

    def accumulate_batch(self, params: Params, batch: Batch) -> float:
        """The loss of all tasks on a minibatch; its gradient is added to `.grad` of the parameters."""
        ...

    def split(self) -> tuple[Objective, Objective]:
        """The same loss on most of the samples, to fit on, and on those that are never fitted on, to judge by."""
        ...

    def softened(self, temperature: float) -> Objective:
        """The same loss with the arrivals' answers about classes, and the model's, at this temperature."""
        ...

    def taught(self, weights: Sequence[float], arrival: Callable[[], Params], always: bool) -> Objective:
        """The objective with the arrival's answers on its task's samples, the last of those with these weights.

        Without `always` it is asked only where the samples have no labels.
        """
        ...

    def seen(self, count: int, weights: Sequence[float] | None = None) -> Objective:
        """The objective of the first `count` tasks of the stream; the samples are shared out anew."""
        ...

    def task_data(self, k: int) -> tuple[Predict, Samples]:
        """The model and the samples of one task, as many as if it were the only one."""
        ...

    def newest(self) -> tuple[Predict, Samples]:
        """The model and the samples of the task that came last."""
        ...


# What a caller may give for an objective: one, or a function of named parameters.
Loss = Objective | Callable[[Params], Tensor]


def as_objective(loss: Loss) -> Objective:
    """An objective as it is; any other function of named parameters as one that knows no tasks."""
    return loss if isinstance(loss, Objective) else FunctionObjective(loss)


def gradient_of(loss: Loss, params: Params, names: Iterable[str]) -> tuple[float, dict[str, Tensor]]:
    """The loss at `params` and its gradient with respect to the named ones."""
    leaves = {n: p.detach() for n, p in params.items()}
    wanted = list(names)
    for name in wanted:
        leaves[name] = leaves[name].requires_grad_()
    value = float(as_objective(loss).accumulate(leaves))
    if not math.isfinite(value):
        raise MergewayError(f"the objective is {value}; the calibration data or the arrival does not fit the model")
    gradients = {name: leaves[name].grad for name in wanted}
    return value, {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in gradients.items()}
