"""Which classes an arrival answers for, where tasks share a head: in a class-incremental stream each has learned its own.

An expert of 4 and 5 has never learned what is no 9. Its answers about 9 are those of the base, and would teach the merged model
to take a 4 for a 9. What it does say is that its samples are none of the classes that only others answer with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mergeway.calibration.samples import Samples

LEAST = 0.25  # of an even share: an arrival that answers with a class less often has not learned it


def with_own_classes(tasks: Sequence[Samples]) -> list[Samples]:
    """The samples, each with the classes that are left to its arrival: all but those that only others under its head answer with."""
    spoken = [None if task.answers is None or task.documents else _spoken(task.answers) for task in tasks]
    return [replace(task, own=_left_to(number, tasks, spoken)) for number, task in enumerate(tasks)]


def _left_to(number: int, tasks: Sequence[Samples], spoken: Sequence[Tensor | None]) -> Tensor | None:
    """The classes of one task; None if these are all, as they are under a head of its own."""
    mine = spoken[number]
    if mine is None:
        return None
    left = torch.ones_like(mine)
    for other, theirs in zip(tasks, spoken, strict=True):
        if theirs is not None and other is not tasks[number] and _share_head(other, tasks[number]):
            left &= mine | ~theirs
    return None if bool(left.all()) else left


def _spoken(answers: Tensor) -> Tensor:
    """The classes that an arrival answers with: each at least a quarter as often as if it answered evenly with as many as it does.

    An even share is exp(−H), H the entropy of its likeliest classes, so one that it takes by mistake now and then is none of them.
    """
    likeliest = answers.argmax(-1).flatten()
    share = likeliest.bincount(minlength=answers.shape[-1]) / len(likeliest)
    even = torch.exp((share * share.clamp(min=1e-30).log()).sum())
    return share >= LEAST * even


def _share_head(one: Samples, other: Samples) -> bool:
    if isinstance(one.head, Tensor) and isinstance(other.head, Tensor):
        return one.head is other.head or torch.equal(one.head, other.head)
    return one.head is None and other.head is None
