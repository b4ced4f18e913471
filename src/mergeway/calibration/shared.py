"""An objective over several ranks: each takes its share of the calibration samples, and holds its rows of the model or all of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mergeway.calibration.objective import Objective, targets
from mergeway.calibration.samples import Samples
from mergeway.core.allocator import map_large_blocks
from mergeway.core.ranks import own_rows, team
from mergeway.errors import OptionError
from mergeway.model.compute import carry_back, compute_of, placed
from mergeway.checkpoint.naming import Names
from mergeway.model.skeleton import local_part, shard_model


def cut(tensor: Tensor) -> Tensor:
    """This rank's rows of a tensor; a single number belongs to the lead."""
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    return rows[own_rows(len(rows), team().rank, team().count)]


def offset(shape: tuple[int, ...]) -> int:
    """Where this rank's rows begin in the flattened tensor."""
    if not shape:
        return 0
    width = torch.Size(shape[1:]).numel()
    return own_rows(shape[0], team().rank, team().count).start * width


class ShardedObjective:
    """The same loss and gradient as the objective's own, of parameters that no rank holds whole.

    `fully_shard` gathers one block of the model at a time and hands every rank its rows of the gradient.
    """

    def __init__(self, objective: Any) -> None:
        self._objective, self._model = _checked(objective)
        self._names = Names(self._model)
        self.tasks, self.shares = objective.tasks, objective.shares
        map_large_blocks()  # or the holes that gathered layers leave would come to as much as the model

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        losses = self.task_losses(params).values()
        return torch.tensor(sum(s * v for s, v in zip(self.shares, losses, strict=True)), dtype=torch.float64)

    def task_losses(self, params: Mapping[str, Tensor]) -> dict[str, float]:
        """The loss of every task, without gradients."""
        self._load(params)
        found = {}
        with torch.no_grad():
            for task in self.tasks:
                batches = _own_batches(task, self._objective._batch)
                mine = sum(float(self._objective._loss({}, rows)) * share for rows, share in batches)
                found[task.task] = team().add_up([mine])[0]
        return found

    def accumulate(self, params: Mapping[str, Tensor]) -> float:
        """The loss; this rank's rows of its gradient are added to `.grad` of the parameters."""
        return sum(s * self.accumulate_task(params, t, s) for s, t in zip(self.shares, self.tasks, strict=True))

    def accumulate_task(self, params: Mapping[str, Tensor], task: Samples, scale: float = 1.0) -> float:
        """One task's loss, `scale` times its gradient added to `.grad` of the parameters."""
        self._load(params)
        total = 0.0
        for rows, share in _own_batches(task, self._objective._batch):
            loss = self._objective._loss({}, rows) * share
            (scale * team().count * loss).backward()  # the ranks' gradients are averaged on their way
            total += float(loss.detach())
        self._collect(params)
        return team().add_up([total])[0]

    def _load(self, params: Mapping[str, Tensor]) -> None:
        """Put the ranks' rows into the model."""
        if not hasattr(self._model, "unshard"):
            inside = {self._names.inside(name) for name in params}
            shard_model(self._model, inside, compute_of(self._objective._predict).where)
        with torch.no_grad():
            for own, parameter in self._model.named_parameters():
                name = self._names.stored(own)
                if name not in params:
                    continue
                if parameter.ndim == 0:
                    parameter.fill_(team().add_up([float(params[name].sum())])[0])
                else:
                    local_part(parameter).copy_(params[name])

    def _collect(self, params: Mapping[str, Tensor]) -> None:
        for own, parameter in self._model.named_parameters():
            name = self._names.stored(own)
            if parameter.grad is None or name not in params:
                continue
            grad, into = parameter.grad, params[name].grad
            if parameter.ndim == 0:
                grad = torch.tensor([team().add_up([float(grad) / team().count])[0]])[: len(params[name])]
            if into is not None:
                into.add_(local_part(grad).to(into.device))
            parameter.grad = None


class SplitObjective:
    """The same loss and gradient as the objective's own, for a rule that needs the whole model on every rank."""

    def __init__(self, objective: Any) -> None:
        self._objective, _ = _checked(objective)
        self._compute = compute_of(objective._predict)
        self.tasks, self.shares = objective.tasks, objective.shares

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        params = self._compute.put(params)
        with torch.no_grad():
            return torch.tensor(team().add_up([sum(float(loss) for loss in self._losses(params))])[0])

    def accumulate(self, params: Mapping[str, Tensor]) -> float:
        """The loss; its gradient, summed over the ranks and so the same on all of them, is added to `.grad`."""
        total = 0.0
        own = {n: p.detach().requires_grad_(p.requires_grad) for n, p in params.items()}
        with placed(own, self._compute.where) as here:
            for loss in self._losses(here):
                if loss.requires_grad:
                    loss.backward()
                total += float(loss.detach())
        for parameter in own.values():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                team().add_in_place(parameter.grad)
        carry_back(own, params)
        return team().add_up([total])[0]

    def _losses(self, params: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """What each of this rank's micro-batches adds to the loss."""
        for weight, task in zip(self.shares, self.tasks, strict=True):
            for rows, share in _own_batches(task, self._objective._batch):
                yield self._objective._loss(params, rows) * (weight * share)


def _checked(objective: Any) -> tuple[Objective, Any]:
    """The objective and its model, if it has one to share."""
    model = getattr(getattr(objective, "_predict", None), "model", None)
    if not isinstance(objective, Objective) or model is None:
        raise OptionError(
            "an objective of your own cannot be shared between ranks; give the tasks' data, or run without torchrun"
        )
    return objective, model


def _own_batches(task: Samples, size: int) -> Iterator[tuple[Samples, float]]:
    """Micro-batches of this rank's samples; all ranks have as many, for each takes part in every gathering."""
    mine, total = task.rows(slice(team().rank, None, team().count)), targets(task)
    for start in range(0, -(-len(task) // team().count), size):
        rows = mine.rows(slice(start, start + size))
        count = targets(rows) if len(rows) else 0
        yield (rows, count / total) if count else (task.rows(slice(1)), 0.0)
