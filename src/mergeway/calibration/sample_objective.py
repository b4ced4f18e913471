"""The objective on samples: the mean loss of the seen tasks, by the arrivals' answers or by labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy

import torch
from torch import Tensor

from mergeway.calibration.batches import Batch, batch_passes, draw_batches
from mergeway.calibration.loss import Predict, mean_loss, targets
from mergeway.calibration.own_classes import with_own_classes
from mergeway.calibration.samples import DEFAULT_SIZE, MINIBATCH, Samples, check_samples, draw, judges, shares
from mergeway.calibration.teaching import TOP_K, answers_of, ask, copied_of, copies_of, told_apart
from mergeway.errors import OptionError
from mergeway.model.compute import compute_of, placed
from mergeway.model.inputs import Params


class SampleObjective:
    """L(θ; D_cal): the mean over tasks of the mean loss of each, weighted by utility when weights are given.

    The loss of a sample is KL(arrival ‖ model) where the arrival was asked (`taught`), else the cross-entropy of its label.

    `size` samples in all, n/k from each of the k tasks or, `by_utility`, as the weights say; micro-batches of `batch` rows
    (by default as many as the model's `Compute` says, or 128, of texts 32) bound the memory and change nothing beyond rounding.
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
        copies: int | None = None,
        top_k: int = TOP_K,
    ) -> None:
        if not tasks:
            raise OptionError("an objective needs at least one task with calibration samples")
        if weights is not None and len(weights) != len(tasks):
            raise OptionError(f"{len(weights)} weights for {len(tasks)} tasks of the objective; give one each")
        for task in tasks:
            check_samples(task, f"calibration samples of '{task.task}'")
        self.predict, self.compute = predict, compute_of(predict)
        self._size, self._by_utility = size, by_utility
        self.temperature = 1.0
        self.copies, self._top_k = copies_of(size, tasks[0].documents) if copies is None else copies, top_k
        self.batch = batch or self.compute.micro_batch or _rows_at_once(tasks[0])
        # What a task keeps when it is the only one: every later, smaller share is the beginning of it.
        self.pool = [draw(t, size, seed) for t in tasks]
        counts = shares(size, len(tasks), weights if by_utility else None)
        self._hold([t.rows(slice(n)).loaded() for t, n in zip(self.pool, counts, strict=True)])
        total = sum(weights) if weights else len(tasks)
        self.shares = [w / total for w in weights] if weights else [1.0 / total] * len(tasks)

    def _hold(self, held: list[Samples], rows: list[list[int]] | None = None) -> None:
        """Ask about these samples, or about some rows of each task.

        All are kept, in the order they were drawn in, because a copy is made from its row's number and a sample before it.
        """
        self._held, self._rows = with_own_classes(held), rows or [list(range(len(task))) for task in held]
        self.tasks = [
            task.rows(torch.tensor(own)).by_length() for task, own in zip(self._held, self._rows, strict=True)
        ]

    def seen(self, count: int, weights: Sequence[float] | None = None) -> SampleObjective:
        """The objective of the first `count` tasks of the stream; the samples are shared out anew."""
        if count > len(self.pool):
            raise OptionError(
                f"the objective has samples of {len(self.pool)} tasks, but {count} arrivals were folded; it needs those of every task"
            )
        return self._with(self.pool[:count], weights)

    def task_data(self, k: int) -> tuple[Predict, Samples]:
        """The model and the samples of one task, as many as if it were the only one."""
        return self.predict, self.pool[k]

    def newest(self) -> tuple[Predict, Samples]:
        """The model and the samples of the task that came last."""
        return self.task_data(-1)

    def _on(self, rows: list[list[int]]) -> SampleObjective:
        """The same loss on some rows of each task."""
        other = copy(self)
        other._hold(self._held, rows)
        return other

    def _with(self, pool: Sequence[Samples], weights: Sequence[float] | None) -> SampleObjective:
        """The same kind of objective over other tasks."""
        by_utility = self._by_utility and weights is not None
        return SampleObjective(
            self.predict,
            pool,
            weights,
            size=self._size,
            batch=self.batch,
            by_utility=by_utility,
            copies=self.copies,
            top_k=self._top_k,
        )

    @property
    def precision(self) -> AbstractContextManager[object]:
        """bfloat16 where the model runs with `autocast`, else as it is."""
        return self.compute.precision("cpu")

    def __call__(self, params: Params) -> Tensor:
        params = self.compute.put(params)
        return torch.stack([s * self.task_loss(params, t) for s, t in zip(self.shares, self.tasks, strict=True)]).sum()

    def loss(self, params: Params, rows: Samples) -> Tensor:
        """The mean loss of a few rows of one task: by the arrival's answers where there are any, else by labels."""
        return mean_loss(self.predict(params, rows.inputs, rows.head), rows, self.temperature)

    def task_loss(self, params: Params, task: Samples) -> Tensor:
        """The mean loss of one task."""
        return torch.stack([self.loss(params, rows) * share for rows, share in self._micro_batches(task)]).sum()

    def task_losses(self, params: Params) -> dict[str, float]:
        """The loss of every task, without gradients."""
        params = self.compute.put(params)
        with torch.no_grad():
            return {t.task: float(self.task_loss(params, t)) for t in self.tasks}

    def accumulate(self, params: Params) -> float:
        """The loss, its gradient added to `.grad` of the parameters one micro-batch at a time."""
        with placed(params, self.compute.where) as here:
            return sum(s * self.accumulate_task(here, t, s) for s, t in zip(self.shares, self.tasks, strict=True))

    def accumulate_task(self, params: Params, task: Samples, scale: float = 1.0) -> float:
        """One task's loss, `scale` times its gradient added to `.grad` of the parameters."""
        total = 0.0
        with placed(params, self.compute.where) as here:
            for rows, share in self._micro_batches(task):
                loss = self.loss(here, rows) * share
                if loss.requires_grad:  # not when nothing that moves takes part, such as an unused pooler
                    torch.autograd.backward(scale * loss)
                total += float(loss.detach())
        return total

    def batches(self, count: int, size: int = MINIBATCH, seed: int = 0) -> Iterator[Batch]:
        """Minibatches drawn by a seed: an equal share of samples, or of their copies, from every task."""
        return draw_batches(self._held, self._rows, count, size, seed)

    def accumulate_batch(self, params: Params, batch: Batch) -> float:
        """The loss of all tasks on a minibatch; its gradient is added to `.grad` of the parameters."""
        total = 0.0
        with placed(params, self.compute.where) as here:
            for one in batch_passes(self.predict, batch, self.shares, self.batch, self.temperature):
                loss = one(here)
                if loss.requires_grad:
                    torch.autograd.backward(loss)
                total += float(loss.detach())
        return total

    def split(self) -> tuple[SampleObjective, SampleObjective]:
        """The same loss on the rows of each task that teach, and on those that judge; a single row does both."""
        fit = [[row for row in own if not judges(row)] for own in self._rows]
        judge = [[row for row in own if judges(row)] or own for own in self._rows]
        return self._on(fit), self._on(judge)

    def softened(self, temperature: float) -> SampleObjective:
        """The same loss at this temperature."""
        other = copy(self)
        other.temperature = temperature
        return other

    def taught(self, weights: Sequence[float], arrival: Callable[[], Params], always: bool) -> SampleObjective:
        """The objective with the arrival's answers on its task's samples, as many as this fold keeps: shares only shrink."""
        number = len(weights) - 1
        held = self.seen(len(weights), weights)._held[-1]
        if held.answers is not None or not (always or not held.labelled):
            return self
        other = copy(self)
        other.pool = [*self.pool]
        other.pool[number] = ask(self.predict, arrival(), held, self.copies, self._top_k, self.batch)
        other._hold(
            [*self._held[:number], other.pool[number].rows(slice(len(self._held[number]))), *self._held[number + 1 :]]
        )
        return other

    def _micro_batches(self, task: Samples) -> Iterator[tuple[Samples, float]]:
        """Micro-batches, each with its share of the task's targets."""
        total = targets(task)
        for start in range(0, len(task), self.batch):
            rows = task.rows(slice(start, start + self.batch)).trimmed()
            count = targets(rows)
            if count:
                yield rows, count / total


def _rows_at_once(samples: Samples) -> int:
    """A small batch of texts of like length needs less padding; a language model has a vocabulary of numbers for every token."""
    if samples.documents:
        return 8
    return 32 if "attention_mask" in samples.inputs else 128


def asked_about(objective: object, task: str) -> dict[str, object]:
    """For the journal: what the arrival of this task was asked about, and how samples and copies came about."""
    tasks = objective.pool if isinstance(objective, SampleObjective) else []
    found: dict[str, object] = {}
    for samples in tasks:
        if samples.task == task and samples.answers is not None:
            found = {"samples": len(samples), **answers_of(samples)}
            if (copied := copied_of(samples)) is not None:
                found["copied"] = copied
            if (apart := told_apart(samples)) is not None:
                found["told_apart"] = apart
            if samples.tops is not None:
                found["top_k"] = int((samples.tops >= 0).sum(-1).min())  # those that were drawn are negative
    return {"asked": found} if found else {}
