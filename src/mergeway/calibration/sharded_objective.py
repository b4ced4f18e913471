"""An objective over several ranks that each hold their rows of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mergeway.calibration.batches import Batch, Pass
from mergeway.calibration.objective import Objective
from mergeway.calibration.samples import Samples
from mergeway.calibration.shared import SharedObjective
from mergeway.checkpoint.naming import Names
from mergeway.core.pool import return_large_blocks
from mergeway.core.ranks import Team, cut
from mergeway.model.inputs import Params
from mergeway.model.skeleton import is_sharded, local_part, shard_model


class ShardedObjective(SharedObjective):
    """The same loss and gradient as the objective's own, of parameters that no rank holds whole.

    `fully_shard` gathers one block of the model at a time and hands every rank its rows of the gradient.
    """

    def __init__(self, objective: Objective, team: Team) -> None:
        super().__init__(objective, team)
        self._model = self._run.model
        self._names = Names(self._model)
        return_large_blocks()  # or the holes that gathered layers leave would come to as much as the model

    def seen(self, count: int, weights: Sequence[float] | None = None) -> ShardedObjective:
        """The objective of the first `count` tasks of the stream."""
        return ShardedObjective(self._objective.seen(count, weights), self._team)

    def split(self) -> tuple[ShardedObjective, ShardedObjective]:
        """The same loss on most of the samples, and on those that are held back."""
        fit, judge = self._objective.split()
        return ShardedObjective(fit, self._team), ShardedObjective(judge, self._team)

    def softened(self, temperature: float) -> ShardedObjective:
        """The same loss at this temperature."""
        return ShardedObjective(self._objective.softened(temperature), self._team)

    def __call__(self, params: Params) -> Tensor:
        losses = self.task_losses(params).values()
        return torch.tensor(sum(s * v for s, v in zip(self.shares, losses, strict=True)), dtype=torch.float64)

    def task_losses(self, params: Params) -> dict[str, float]:
        """The loss of every task, without gradients."""
        self._load(params)
        found: dict[str, float] = {}
        with torch.no_grad():
            for task in self.tasks:
                mine = sum(float(self._objective.loss({}, rows)) * share for rows, share in self._own_batches(task))
                found[task.task] = self._team.add_up([mine])[0]
        return found

    def accumulate(self, params: Params) -> float:
        """The loss; this rank's rows of its gradient are added to `.grad` of the parameters."""
        return sum(s * self.accumulate_task(params, t, s) for s, t in zip(self.shares, self.tasks, strict=True))

    def accumulate_task(self, params: Params, task: Samples, scale: float = 1.0) -> float:
        """One task's loss, `scale` times its gradient added to `.grad` of the parameters."""
        self._load(params)
        total = 0.0
        for rows, share in self._own_batches(task):
            total += self._backward(self._objective.loss({}, rows) * share, scale)
        self._collect(params)
        return self._team.add_up([total])[0]

    def accumulate_batch(self, params: Params, batch: Batch) -> float:
        """The loss on a minibatch, each rank having its share of the rows; its rows of the gradient are added to `.grad`."""
        self._load(params)
        passes, total = self._own_passes(batch), 0.0
        # Each rank takes part in every gathering of a block, so all make as many passes.
        missing = max(self._team.gather(len(passes))) - len(passes)
        for one in [*passes, *([self._idle_pass(batch)] * missing if missing else [])]:
            total += self._backward(one({}), 1.0)
        self._collect(params)
        return self._team.add_up([total])[0]

    def _backward(self, loss: Tensor, scale: float) -> float:
        """The loss; its gradient is left in the model unless nobody wants one. The ranks' gradients are averaged on their way."""
        if loss.requires_grad:
            torch.autograd.backward(scale * self._team.count * loss)
        return float(loss.detach())

    def _idle_pass(self, batch: Batch) -> Pass:
        """One row that counts nothing."""
        rows = (task.rows(slice(row, row + 1)) for task in batch for row in range(len(task)))
        return next(passes[0] for row in rows if (passes := self._passes([row], [0.0])))

    def taught(self, weights: Sequence[float], arrival: Callable[[], Params], always: bool) -> Objective:
        """The objective itself with the answers of an arrival of which each rank has its rows; every rank hears the same."""

        def loaded() -> Params:
            self._load(arrival())
            return {}

        return super().taught(weights, loaded, always)

    def _load(self, params: Params) -> None:
        """Put the ranks' rows into the model."""
        if not is_sharded(self._model):
            inside = {self._names.inside(name) for name in params}
            shard_model(self._model, inside, self._objective.compute.where, self._team.count)
        with torch.no_grad():
            for own, parameter in self._model.named_parameters():
                name = self._names.stored(own)
                if name not in params:
                    continue
                if parameter.ndim == 0:
                    parameter.fill_(self._team.add_up([float(params[name].sum())])[0])
                else:
                    local_part(parameter).copy_(params[name])
            for own, buffer in self._model.named_buffers():  # such as running means, which no rank has in rows
                if (name := self._names.stored(own)) in params:
                    buffer.copy_(self._whole(params[name], buffer))

    def _whole(self, rows: Tensor, like: Tensor) -> Tensor:
        """A tensor of which each rank has its rows."""
        whole = torch.zeros(like.shape or (1,), dtype=rows.dtype)
        cut(whole, self._team).copy_(rows)
        self._team.add_in_place(whole)
        return whole.reshape(like.shape)

    def _collect(self, params: Params) -> None:
        for own, parameter in self._model.named_parameters():
            name = self._names.stored(own)
            if parameter.grad is None or name not in params:
                continue
            grad, into = parameter.grad, params[name].grad
            if parameter.ndim == 0:
                grad = torch.tensor([self._team.add_up([float(grad) / self._team.count])[0]])[: len(params[name])]
            if into is not None:
                into.add_(local_part(grad).to(into.device))
            parameter.grad = None
