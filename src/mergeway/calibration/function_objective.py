"""A loss of the user's own as an objective: what needs tasks or samples is refused in one clear line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mergeway.calibration.loss import Predict
from mergeway.calibration.samples import MINIBATCH, Samples
from mergeway.errors import MergewayError, OptionError
from mergeway.model.inputs import Params


class FunctionObjective:
    """A function of the user's own from named tensors to a loss; it knows no tasks, and autograd gives its gradient."""

    tasks: Sequence[Samples] = ()
    shares: Sequence[float] = ()

    def __init__(self, function: Callable[[Params], Tensor]) -> None:
        # Nobody has checked what the user's function returns.
        self._function: Callable[[Params], object] = function

    @property
    def precision(self) -> AbstractContextManager[None]:
        """As it is: only the function knows how it multiplies."""
        return nullcontext()

    def __call__(self, params: Params) -> Tensor:
        value = self._function(params)
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise MergewayError(f"the objective returned {what}; it must return one number as a tensor")
        return value.reshape(())

    def accumulate(self, params: Params) -> float:
        """The loss; its gradient is added to `.grad` of the parameters."""
        value = self(params)
        if value.requires_grad:
            torch.autograd.backward(value)
        return float(value.detach())

    def seen(self, count: int, weights: Sequence[float] | None = None) -> FunctionObjective:
        """The function itself: it is the same at every fold."""
        return self

    def task_losses(self, params: Params) -> dict[str, float]:
        """Refused: a function has no tasks."""
        raise OptionError("barrier=per-task needs per-task losses; the objective must be a mergeway Objective")

    def accumulate_task(self, params: Params, task: Samples, scale: float = 1.0) -> float:
        """Refused: a function has no tasks."""
        raise OptionError(
            "task_norm and metric=diagonal need per-task gradients; the objective must be a mergeway Objective"
        )

    def batches(self, count: int, size: int = MINIBATCH, seed: int = 0) -> Iterator[Sequence[Samples]]:
        """Nothing to draw from: every batch is the whole function."""
        yield from ([] for _ in range(count))

    def accumulate_batch(self, params: Params, batch: Sequence[Samples]) -> float:
        """The loss; its gradient is added to `.grad` of the parameters."""
        return self.accumulate(params)

    def split(self) -> tuple[FunctionObjective, FunctionObjective]:
        """The function itself, to fit on and to judge by."""
        return self, self

    def softened(self, temperature: float) -> FunctionObjective:
        """The function itself: it asks nobody."""
        return self

    def taught(self, weights: Sequence[float], arrival: Callable[[], Params], always: bool) -> FunctionObjective:
        """The function itself: it says what it wants."""
        return self

    def task_data(self, k: int) -> tuple[Predict, Samples]:
        """Refused: a function has no model and no samples."""
        raise OptionError("a task's statistics are taken from its samples; give the task's data, not a function")

    def newest(self) -> tuple[Predict, Samples]:
        """Refused: a function has no model and no samples."""
        return self.task_data(-1)
