"""Asking an arrival: its own logits on its samples and on their copies, kept in place of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mergeway.calibration.copies import copy_rows
from mergeway.calibration.loss import Predict
from mergeway.calibration.samples import Samples
from mergeway.errors import OptionError
from mergeway.model.compute import compute_of
from mergeway.model.inputs import Params

INPUTS = 8192  # samples and copies that a memory is worth in all, unless it is told how many copies
MOST_COPIES = 63
_ASKED_AT_ONCE = 128


def copies_of(size: int) -> int:
    """How many copies of each sample make up for a small memory: 7 at 1024 samples, 63 at 128."""
    return min(MOST_COPIES, max(0, INPUTS // size - 1))


def ask(predict: Predict, arrival: Params, samples: Samples, copies: int) -> Samples:
    """The samples with the arrival's answers, in half precision."""
    compute = compute_of(predict)
    params = compute.put({n: p.float() if p.is_floating_point() else p for n, p in arrival.items()})
    samples = samples.loaded()
    answers: list[Tensor] = []
    with torch.no_grad():
        for number in range(copies + 1):
            rows = [
                predict(params, part.inputs, part.head).cpu()
                for part in _parts(with_copies(samples, range(len(samples)), [number] * len(samples)))
            ]
            answers.append(torch.cat(rows).half())
    found = torch.stack(answers, 1)
    if not bool(torch.isfinite(found).all()):
        raise OptionError(f"the arrival's answers on the samples of '{samples.task}' are not finite in half precision")
    return replace(samples, answers=found)


def with_copies(samples: Samples, rows: Sequence[int], numbers: Sequence[int]) -> Samples:
    """Copy `numbers[i]` of example `rows[i]` for every i, 0 being the example itself, each with its one answer."""
    index = torch.tensor(list(rows), dtype=torch.long)
    chosen = samples.rows(index)
    if samples.answers is not None:
        chosen = replace(chosen, answers=samples.answers[index, torch.tensor(list(numbers))][:, None])
    places = [i for i, number in enumerate(numbers) if number]
    if not places:
        return chosen
    copied = copy_rows(samples.tensors, [rows[i] for i in places], [numbers[i] for i in places], samples.task)
    inputs = {name: tensor.clone() for name, tensor in chosen.tensors.items()}
    for name, tensor in copied.items():
        inputs[name][places] = tensor
    return replace(chosen, inputs=inputs)


def _parts(samples: Samples) -> list[Samples]:
    return [samples.rows(slice(i, i + _ASKED_AT_ONCE)).trimmed() for i in range(0, len(samples), _ASKED_AT_ONCE)]
