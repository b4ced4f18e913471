"""Which rows of a shared head a class-incremental training takes its losses over: its own classes, or those of earlier tasks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mergeway.calibration.samples import Samples
from mergeway.calibration.suite import SuiteData
from mergeway.errors import OptionError
from mergeway.train.training import Training


def among_own(suite: SuiteData, tasks: Sequence[str], data: Sequence[Samples], training: Training) -> list[Samples]:
    """The samples under the classes of the tasks that are trained together; under the whole head where `classes` is all."""
    own = classes_of(suite, tasks)
    if training.classes == "all" or own is None:
        return list(data)
    return [samples.among(own) for samples in data]


def distilled_heads(
    suite: SuiteData, tasks: Sequence[str], learned: Sequence[str] | None, training: Training
) -> list[Tensor | None]:
    """What LwF distils under, task by task: the head's rows of the tasks behind the start, or all; None where nothing is distilled."""
    for name in learned or ():
        suite.task(name)
    first = learned is not None and not learned
    if not training.lwf or (training.lwf_classes == "old" and first):
        return [None for _ in tasks]
    whole = [suite.samples(name, "train") for name in tasks]
    if training.lwf_classes == "all" or suite.protocol != "cil":
        return [matrix_of(samples) for samples in whole]
    if learned is None:
        raise OptionError(
            "--lwf: nothing says which tasks the start has learned; name them with --learned, or distil the whole head with --lwf-classes all"
        )
    old = list(classes_of(suite, learned) or ())
    return [matrix_of(samples)[old] for samples in whole]


def matrix_of(samples: Samples) -> Tensor:
    """The head of a suite's task, which is one matrix of class vectors."""
    if not isinstance(samples.head, Tensor):
        raise OptionError(f"the head of '{samples.task}' is not one matrix of class vectors; fine-tuning needs that")
    return samples.head


def classes_of(suite: SuiteData, tasks: Sequence[str]) -> tuple[int, ...] | None:
    """The rows of the head that are the classes of these tasks; None where every task has all of them."""
    if suite.protocol != "cil":
        return None
    return tuple(sorted({label for name in tasks for label in suite.task(name).labels or ()}))
