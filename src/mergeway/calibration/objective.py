"""The objective: the loss of the seen tasks on their calibration samples, as a function of named parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.samples import DEFAULT_SIZE, MASKED, Samples, check_samples, draw, shares
from mergeway.errors import MergewayError, OptionError
from mergeway.model.compute import compute_of, placed

# Logits of a batch: predict(params, inputs, head); what a head is depends on the kind of model.
Predict = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Any], Tensor]


class Objective:
    """L(θ; D_cal): the mean over tasks of the mean cross-entropy of each, weighted by utility when weights are given.

    `size` samples in all, n/k from each of the k tasks or, `by_utility`, as the weights say; micro-batches of `batch` rows
    (by default as many as the predictor's `Compute` says, or 128, of texts 32) bound the memory and change nothing beyond rounding.
    Labels with a second axis are tokens: the loss is that of the next one, over all that are not masked by -100.
    """

    def __init__(
        self,
        predict: Predict,
        tasks: Sequence[Samples],
        weights: Sequence[float] | None = None,
        *,
        size: int = DEFAULT_SIZE,
        seed: int = 0,
        batch: int | None = None,
        by_utility: bool = False,
    ) -> None:
        if not tasks:
            raise OptionError("an objective needs at least one task with calibration samples")
        if weights is not None and len(weights) != len(tasks):
            raise OptionError(f"{len(weights)} weights for {len(tasks)} tasks of the objective; give one each")
        for task in tasks:
            check_samples(task, f"calibration samples of '{task.task}'")
        self._predict, self._size, self._by_utility = predict, size, by_utility
        self._compute = compute_of(predict)
        texts = "attention_mask" in tasks[0].inputs  # a small batch of texts of like length needs less padding
        self._batch = batch or self._compute.micro_batch or (32 if texts else 128)
        # What a task keeps when it is the only one: every later, smaller share is the beginning of it.
        self._pool = [draw(t, size, seed) for t in tasks]
        counts = shares(size, len(tasks), weights if by_utility else None)
        self.tasks = [t.rows(slice(n)).by_length() for t, n in zip(self._pool, counts, strict=True)]
        total = sum(weights) if weights else len(tasks)
        self.shares = [w / total for w in weights] if weights else [1.0 / total] * len(tasks)

    def seen(self, count: int, weights: Sequence[float] | None = None) -> Objective:
        """The objective of the first `count` tasks of the stream; the samples are shared out anew."""
        if count > len(self._pool):
            raise OptionError(
                f"the objective has samples of {len(self._pool)} tasks, but {count} arrivals were folded; it needs those of every task"
            )
        return self._with(self._pool[:count], weights)

    def newest(self) -> tuple[Predict, Samples]:
        """The model and the samples of the task that came last, as many as if it were the only one."""
        return self._predict, self._pool[-1]

    def halves(self) -> tuple[Objective, Objective]:
        """The same objective on every other sample, twice: one half to fit on, the other to judge by."""
        made = []
        for offset in (0, 1):
            half = self._with(self._pool, None)
            half.tasks = [t.rows(slice(offset, None, 2)) if len(t) > 1 else t for t in self.tasks]
            half.shares = self.shares
            made.append(half)
        return made[0], made[1]

    def _with(self, pool: Sequence[Samples], weights: Sequence[float] | None) -> Objective:
        """The same kind of objective over other tasks."""
        by_utility = self._by_utility and weights is not None
        return Objective(self._predict, pool, weights, size=self._size, batch=self._batch, by_utility=by_utility)

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        params = self._compute.put(params)
        return torch.stack([s * self.task_loss(params, t) for s, t in zip(self.shares, self.tasks, strict=True)]).sum()

    def task_loss(self, params: Mapping[str, Tensor], task: Samples) -> Tensor:
        """The mean loss of one task."""
        return torch.stack([self._loss(params, rows) * share for rows, share in self._batches(task)]).sum()

    def task_losses(self, params: Mapping[str, Tensor]) -> dict[str, float]:
        """The loss of every task, without gradients."""
        params = self._compute.put(params)
        with torch.no_grad():
            return {t.task: float(self.task_loss(params, t)) for t in self.tasks}

    def accumulate(self, params: Mapping[str, Tensor]) -> float:
        """The loss, its gradient added to `.grad` of the parameters one micro-batch at a time."""
        with placed(params, self._compute.where) as here:
            return sum(s * self.accumulate_task(here, t, s) for s, t in zip(self.shares, self.tasks, strict=True))

    def accumulate_task(self, params: Mapping[str, Tensor], task: Samples, scale: float = 1.0) -> float:
        """One task's loss, `scale` times its gradient added to `.grad` of the parameters."""
        total = 0.0
        with placed(params, self._compute.where) as here:
            for rows, share in self._batches(task):
                loss = self._loss(here, rows) * share
                if loss.requires_grad:  # not when nothing that moves takes part, such as an unused pooler
                    (scale * loss).backward()
                total += float(loss.detach())
        return total

    def _loss(self, params: Mapping[str, Tensor], rows: Samples) -> Tensor:
        return cross_entropy(self._predict(params, rows.inputs, rows.head), rows.labels)

    def _batches(self, task: Samples) -> Iterator[tuple[Samples, float]]:
        """Micro-batches, each with its share of the task's targets."""
        total = targets(task)
        for start in range(0, len(task), self._batch):
            rows = task.rows(slice(start, start + self._batch)).trimmed()
            count = targets(rows)
            if count:
                yield rows, count / total


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of classes, or of every next token that is not masked, where the logits are."""
    labels = labels.to(logits.device)
    if logits.dtype is torch.bfloat16:  # what autocast leaves behind
        logits = logits.float()
    if labels.ndim == 1:
        return functional.cross_entropy(logits, labels)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def targets(samples: Samples) -> int:
    """How many predictions are judged: one a sample, or one for every next token that is not masked."""
    return len(samples) if samples.labels.ndim == 1 else int((samples.labels[:, 1:] != MASKED).sum())


def gradient_of(loss: Any, params: Mapping[str, Tensor], names: Iterable[str]) -> tuple[float, dict[str, Tensor]]:
    """The loss at `params` and its gradient with respect to the named ones; micro-batched where the loss knows how."""
    leaves = {n: p.detach() for n, p in params.items()}
    wanted = list(names)
    for name in wanted:
        leaves[name] = leaves[name].requires_grad_()
    if hasattr(loss, "accumulate"):
        value = float(loss.accumulate(leaves))
    else:
        result = loss(leaves)
        result.backward()
        value = float(result.detach())
    if not math.isfinite(value):
        raise MergewayError(f"the objective is {value}; the calibration data or the arrival does not fit the model")
    return value, {n: torch.zeros_like(leaves[n]) if leaves[n].grad is None else leaves[n].grad for n in wanted}  # type: ignore[misc]
