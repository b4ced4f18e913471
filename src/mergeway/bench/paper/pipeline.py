"""Holistic CMM on one stream: Algorithm 1 with each of its stages on or off, and the methods it is compared with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mergeway.bench.recommended import recommended
from mergeway.bench.suite import Suite
from mergeway.calibration.alignment import Alignment, align
from mergeway.calibration.description import CLASSIFIERS
from mergeway.checkpoint import open_checkpoint
from mergeway.fold.merge import merge
from mergeway.model.model import Encoder
from mergeway.rules import Fisher, make
from mergeway.train import Finetuned, Tangent, Training, finetune

Params = dict[str, Tensor]

LAMBDA = float(Fisher().lam)  # 0.4 in the released scripts: what the arrival counts against the model before it
LWF, EWC = 0.3, 1e6
TIES_DENSITY, TIES_SCALING = 0.2, 0.55


@dataclass(frozen=True)
class Stages:
    """What is done before, during and after a merge; without a merge every task's end is what is deployed."""

    merge: Literal["fisher", "linear"] | None = "fisher"
    tangent: bool = False
    align: bool = False


@dataclass(frozen=True)
class Step:
    """One task of a stream: the model before it, the model as merged, as deployed (aligned), v as carried over, and d_t."""

    task: str
    previous: Params
    merged: Params
    deployed: Params
    moments: Params
    bias: tuple[float, float] | None = None


class Stream:
    """The tasks of a suite in their order, trained with one seed; every method is given the same training."""

    def __init__(self, suite: Suite, tasks: Sequence[str], training: Training, alignment: Alignment) -> None:
        self.suite, self.tasks = suite, list(tasks)
        self.training, self.alignment = training, alignment
        checkpoint = open_checkpoint(suite.base)
        self.base: Params = {n: checkpoint.read(n).float() for n, i in checkpoint.infos.items() if i.merges}

    def reading(self, tangent: bool) -> Encoder | Tangent:
        """How parameters become features: those trained in the tangent space are read there too."""
        return Tangent(self.suite.encoder, self.base) if tangent else self.suite.encoder

    def accuracies(self, params: Params, tangent: bool = False) -> dict[str, list[float]]:
        """R_{N,i}, the accuracy on each task among the classes of all, by classifier."""
        found = {}
        for classifier in CLASSIFIERS:
            judged = self.suite.judge(
                params, self.tasks, self.tasks, through=self.reading(tangent), classifier=classifier
            )
            found[classifier] = [accuracy for accuracy, _ in judged]
        return found

    def tune(self, tasks: str | Sequence[str], start: Params | None = None, *, tangent: bool = False) -> Finetuned:
        """A fine-tuning on one task, or on several jointly."""
        return finetune(self.suite, tasks, None, replace(self.training, tangent=tangent), start=start)

    @cached_property
    def experts(self) -> list[Params]:
        """One model for each task, every one from the base."""
        return [self.tune(task).params for task in self.tasks]

    def pipeline(self, stages: Stages) -> Iterator[Step]:
        """Algorithm 1, one step for each task; every task begins with what is deployed."""
        deployed, moments = self.base, None
        for task in self.tasks:
            previous = deployed
            done = self.tune(task, previous, tangent=stages.tangent)
            if stages.merge is None or moments is None:
                moments, deployed = done.moments, done.params
                yield Step(task, previous, deployed, deployed, moments)
                continue
            merged = interpolate(self.base, previous, done.params, moments, done.moments, LAMBDA, stages.merge)
            moments = {n: LAMBDA * v + (1 - LAMBDA) * moments[n] for n, v in done.moments.items()}
            deployed, bias = merged, None
            if stages.align:
                data = self.suite.samples(task, "train")
                aligned = align(self.reading(stages.tangent), merged, previous, data, self.alignment)
                deployed, bias = merged | aligned.moved, (aligned.before, aligned.after)
            yield Step(task, previous, merged, deployed, moments, bias)

    def regularised(self, training: Training) -> Params:
        """LwF or EWC: each task from the end of the one before; a directory hands on the Fisher information."""
        start = None
        params = self.base
        with tempfile.TemporaryDirectory() as folder:
            for task in self.tasks:
                # After the last task the Fisher information is not needed.
                out = Path(folder) / task if task != self.tasks[-1] else None
                params = finetune(self.suite, task, out, training, start=start).params
                start = out
        return params

    def merged(self, rule: str, **options: object) -> Params:
        """The experts under a rule that needs nothing else."""
        return merge(self.base, self.experts, make(rule, options), threads=1)


def interpolate(
    base: Params,
    first: Params,
    second: Params,
    first_moments: Params,
    second_moments: Params,
    lam: float,
    how: Literal["fisher", "linear"],
) -> Params:
    """The model between two at λ: Eq. 4, or the straight line."""
    if how == "linear":
        return {n: (1 - lam) * first[n] + lam * second[n] for n in first}
    # Eq. 4 is the second fold of a stream of two, whose first brings what was carried over.
    return merge(base, [first, second], Fisher(lam=lam), moments=[first_moments, second_moments], threads=1)


def ties_at_once(base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]]) -> Params:
    """TIES over all experts together: trim each update, elect signs by mass, take the mean of those that agree.

    The rule `ties` is another one, which sees one arrival at a time.
    """
    flat = torch.stack([torch.cat([(e[n] - base[n]).flatten() for n in base]) for e in experts])
    kept = max(1, int(TIES_DENSITY * flat.shape[1]))
    for row in flat:
        row[row.abs() < row.abs().topk(kept).values[-1]] = 0
    sign = torch.sign(flat.sum(0))
    agreeing = torch.where(torch.sign(flat) == sign, flat, 0)
    update = TIES_SCALING * agreeing.sum(0) / (agreeing != 0).sum(0).clamp_min(1)
    parts = update.split([base[n].numel() for n in base])
    return {n: base[n] + part.view_as(base[n]) for n, part in zip(base, parts, strict=True)}


def settings_of(suite: Suite, seed: int) -> tuple[Training, Alignment]:
    """How the models of a suite are trained and aligned: the paper's numbers unless its suite.json says otherwise."""
    fixed = {"seed": seed}
    return recommended(suite, "training", Training, fixed), recommended(suite, "alignment", Alignment, fixed)
