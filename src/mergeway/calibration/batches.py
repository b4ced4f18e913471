"""Minibatches over all tasks: drawn by a seed from samples and their copies, and run through the model together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mergeway.calibration.loss import Predict, targets, total_loss
from mergeway.calibration.samples import Samples, shares
from mergeway.calibration.teaching import with_copies
from mergeway.core.tensors import whole_numbers
from mergeway.model.inputs import Inputs, Params
from mergeway.model.model import Encoder, scaled_cosine

# A few rows of every task, each with its label or its one answer.
Batch = Sequence[Samples]
# A forward pass with these parameters, and the part of the loss that it finds.
Pass = Callable[[Params], Tensor]
DOCUMENT = 4  # samples that a document counts for in a batch: it is judged at every token


def rows_in_a_batch(tasks: Sequence[Samples], size: int) -> int:
    """How many rows make up a batch of that size: at least one of each task, of documents a quarter as many."""
    return max(size // DOCUMENT if any(task.documents for task in tasks) else size, len(tasks))


def draw_batches(
    tasks: Sequence[Samples], rows: Sequence[Sequence[int]], count: int, size: int, seed: int
) -> Iterator[Batch]:
    """`count` minibatches with an equal share from every task, of these rows of it; a copy counts as its sample does."""
    generator = torch.Generator().manual_seed(seed)
    counts = shares(rows_in_a_batch(tasks, size), len(tasks))
    for _ in range(count):
        batch: list[Samples] = []
        for task, own, share in zip(tasks, rows, counts, strict=True):
            versions = 1 if task.answers is None else task.answers.shape[1]
            drawn = whole_numbers(torch.randperm(len(own) * versions, generator=generator)[:share])
            batch.append(with_copies(task, [own[i // versions] for i in drawn], [i % versions for i in drawn]))
        yield batch


def batch_passes(
    predict: Predict, batch: Batch, weights: Sequence[float], most: int, temperature: float = 1.0
) -> list[Pass]:
    """The passes over a batch, at most `most` rows each: what one adds to Σ_j weight_j · mean loss of task j.

    An encoder reads the rows of all tasks together, texts of like length side by side; the heads come after it.
    """
    if isinstance(predict, Encoder):
        return _together(predict, batch, weights, most, temperature)
    passes: list[Pass] = []
    for task, weight in zip(batch, weights, strict=True):
        total = targets(task)
        for start in range(0, len(task), most):
            rows = task.rows(slice(start, start + most)).trimmed()
            if targets(rows):
                passes.append(partial(_alone, predict, rows, weight / total, temperature))
    return passes


def _alone(predict: Predict, rows: Samples, share: float, temperature: float, params: Params) -> Tensor:
    return total_loss(predict(params, rows.inputs, rows.head), rows, temperature) * share


def _together(encoder: Encoder, batch: Batch, weights: Sequence[float], most: int, temperature: float) -> list[Pass]:
    owner = torch.cat([torch.full((len(task),), k) for k, task in enumerate(batch)])
    place = torch.cat([torch.arange(len(task)) for task in batch])
    names = batch[0].inputs
    whole = Samples("", {n: torch.cat([task.tensors[n] for task in batch]) for n in names}, owner)
    order = torch.arange(len(whole)) if whole.mask is None else whole.mask.sum(-1).argsort(stable=True)
    passes: list[Pass] = []
    for part in torch.split(order, most):
        heads: list[_Headed] = []
        for k, (task, weight) in enumerate(zip(batch, weights, strict=True)):
            mine = (owner[part] == k).nonzero().flatten()
            if len(mine):
                heads.append(_Headed(mine, task.rows(place[part[mine]]), weight / len(task)))
        passes.append(partial(_under_heads, encoder, whole.rows(part).trimmed().inputs, heads, temperature))
    return passes


class _Headed(NamedTuple):
    """The rows of a pass that are one task's: where they stand in it, what they are, and what each counts."""

    places: Tensor
    rows: Samples
    share: float


def _under_heads(
    encoder: Encoder, inputs: Inputs, heads: Sequence[_Headed], temperature: float, params: Params
) -> Tensor:
    features = encoder.features(params, inputs)
    logits = (scaled_cosine(encoder.scale, features[own.places], own.rows.head) for own in heads)
    losses = [total_loss(found, own.rows, temperature) * own.share for found, own in zip(logits, heads, strict=True)]
    return torch.stack(losses).sum()
