"""An objective over several ranks that each hold the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mergeway.calibration.batches import Batch
from mergeway.calibration.samples import Samples
from mergeway.calibration.shared import SharedObjective
from mergeway.model.compute import carry_back, placed
from mergeway.model.inputs import Params


class SplitObjective(SharedObjective):
    """The same loss and gradient as the objective's own, for a rule that needs the whole model on every rank."""

    def seen(self, count: int, weights: Sequence[float] | None = None) -> SplitObjective:
        """The objective of the first `count` tasks of the stream."""
        return SplitObjective(self._objective.seen(count, weights), self._team)

    def __call__(self, params: Params) -> Tensor:
        params = self._objective.compute.put(params)
        with torch.no_grad():
            return torch.tensor(self._team.add_up([sum(float(loss) for loss in self._all_losses(params))])[0])

    def task_losses(self, params: Params) -> dict[str, float]:
        """The loss of every task, without gradients."""
        params = self._objective.compute.put(params)
        with torch.no_grad():
            mine = [sum(float(loss) for loss in self._losses(params, task, 1.0)) for task in self.tasks]
        return dict(zip((t.task for t in self.tasks), self._team.add_up(mine), strict=True))

    def accumulate(self, params: Params) -> float:
        """The loss; its gradient, summed over the ranks and so the same on all of them, is added to `.grad`."""
        return self._accumulate(params, self._all_losses, 1.0)

    def accumulate_task(self, params: Params, task: Samples, scale: float = 1.0) -> float:
        """One task's loss, `scale` times its gradient added to `.grad` of the parameters."""
        return self._accumulate(params, lambda here: self._losses(here, task, 1.0), scale)

    def accumulate_batch(self, params: Params, batch: Batch) -> float:
        """The loss on a minibatch, each rank having its share of the rows; its gradient is added to `.grad`."""
        passes = self._own_passes(batch)
        return self._accumulate(params, lambda here: (one(here) for one in passes), 1.0)

    def split(self) -> tuple[SplitObjective, SplitObjective]:
        """The same loss on most of the samples, and on those that are held back."""
        fit, judge = self._objective.split()
        return SplitObjective(fit, self._team), SplitObjective(judge, self._team)

    def softened(self, temperature: float) -> SplitObjective:
        """The same loss at this temperature."""
        return SplitObjective(self._objective.softened(temperature), self._team)

    def _accumulate(self, params: Params, losses: Callable[[Params], Iterator[Tensor]], scale: float) -> float:
        total = 0.0
        own = {n: p.detach().requires_grad_(p.requires_grad) for n, p in params.items()}
        with placed(own, self._objective.compute.where) as here:
            for loss in losses(here):
                if loss.requires_grad:
                    torch.autograd.backward(scale * loss)
                total += float(loss.detach())
        for parameter in own.values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._team.add_in_place(parameter.grad)
        carry_back(own, params)
        return self._team.add_up([total])[0]

    def _all_losses(self, params: Params) -> Iterator[Tensor]:
        for weight, task in zip(self.shares, self.tasks, strict=True):
            yield from self._losses(params, task, weight)

    def _losses(self, params: Params, task: Samples, weight: float) -> Iterator[Tensor]:
        """What each of this rank's micro-batches of a task adds to the loss."""
        for rows, share in self._own_batches(task):
            yield self._objective.loss(params, rows) * (weight * share)
