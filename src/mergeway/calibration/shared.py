"""An objective over several ranks: each takes its share of the calibration samples, and holds its rows of the model or all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mergeway.calibration.batches import Batch, Pass, batch_passes
from mergeway.calibration.loss import Predict, targets
from mergeway.calibration.objective import Objective
from mergeway.calibration.sample_objective import SampleObjective
from mergeway.calibration.samples import MINIBATCH, Samples
from mergeway.checkpoint.naming import Names
from mergeway.core.pool import return_large_blocks
from mergeway.core.ranks import Team, own_rows
from mergeway.errors import OptionError
from mergeway.model.compute import carry_back, placed
from mergeway.model.inputs import Params
from mergeway.model.model import Network
from mergeway.model.skeleton import is_sharded, local_part, shard_model


def cut(tensor: Tensor, team: Team) -> Tensor:
    """This rank's rows of a tensor; a single number belongs to the lead."""
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    return rows[own_rows(len(rows), team.rank, team.count)]


def offset(shape: tuple[int, ...], team: Team) -> int:
    """Where this rank's rows begin in the flattened tensor."""
    if not shape:
        return 0
    width = torch.Size(shape[1:]).numel()
    return own_rows(shape[0], team.rank, team.count).start * width


class _Shared:
    """The samples of an objective, which every rank has, and this rank's part of them."""

    def __init__(self, objective: Objective, team: Team) -> None:
        if not isinstance(objective, SampleObjective) or not isinstance(objective.predict, Network):
            raise OptionError(
                "an objective of your own cannot be shared between ranks; give the tasks' data, or run without torchrun"
            )
        self._objective, self._team = objective, team
        self._run = objective.predict.run  # looks at the model before its parameters are cut
        self.tasks, self.shares = objective.tasks, objective.shares

    @property
    def precision(self) -> AbstractContextManager[object]:
        """That of the objective itself."""
        return self._objective.precision

    def batches(self, count: int, size: int = MINIBATCH, seed: int = 0) -> Iterator[Batch]:
        """The same minibatches on every rank."""
        return self._objective.batches(count, size, seed)

    def accumulate_batch(self, params: Params, batch: Batch) -> float:
        """The loss on a minibatch; its gradient is added to `.grad`."""
        raise NotImplementedError

    def taught(self, weights: Sequence[float], arrival: Callable[[], Params], always: bool) -> Objective:
        """The objective itself with the arrival's answers: every rank asks for itself, and hears the same."""
        return self._objective.taught(weights, arrival, always)

    def task_data(self, k: int) -> tuple[Predict, Samples]:
        """The model and the samples of one task."""
        return self._objective.task_data(k)

    def newest(self) -> tuple[Predict, Samples]:
        """The model and the samples of the task that came last."""
        return self._objective.newest()

    def _own_passes(self, batch: Batch) -> list[Pass]:
        """Those over this rank's share of a minibatch's rows."""
        mine = [task.rows(slice(self._team.rank, None, self._team.count)) for task in batch]
        parts = [targets(own) / max(1, targets(task)) for own, task in zip(mine, batch, strict=True)]
        kept = [(own, share * part) for own, share, part in zip(mine, self.shares, parts, strict=True) if part]
        return self._passes([own for own, _ in kept], [weight for _, weight in kept]) if kept else []

    def _passes(self, batch: Batch, weights: Sequence[float]) -> list[Pass]:
        ours = self._objective
        return batch_passes(ours.predict, batch, weights, ours.batch, ours.temperature)

    def _own_batches(self, task: Samples) -> Iterator[tuple[Samples, float]]:
        """Micro-batches of this rank's samples; all ranks have as many, for each takes part in every gathering."""
        mine, total = task.rows(slice(self._team.rank, None, self._team.count)), targets(task)
        for start in range(0, -(-len(task) // self._team.count), self._objective.batch):
            rows = mine.rows(slice(start, start + self._objective.batch))
            count = targets(rows) if len(rows) else 0
            yield (rows, count / total) if count else (task.rows(slice(1)), 0.0)


class ShardedObjective(_Shared):
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
        for one in [*passes, *[self._idle_pass(batch)] * missing]:
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


class SplitObjective(_Shared):
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
