"""iCaRL (Rebuffi et al. 2017) under a frozen head, for Holistic CMM's Table 2: exemplars by herding, distillation, nearest mean.

Deviates: softmax in the place of sigmoids, over the classes seen; what is learned is the encoder, as with every method here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.bench.paper.pipeline import Params, Stream
from mergeway.bench.suite import Suite
from mergeway.calibration.description import CLASSIFIERS
from mergeway.calibration.samples import Samples
from mergeway.train import finetune

PER_CLASS = 20  # at the end, when all classes are seen: 2000 exemplars of CIFAR-100's hundred


class Rehearsed(Suite):
    """A suite that has only exemplars left of the training data of some tasks."""

    def __init__(self, suite: Suite, exemplars: Mapping[str, Samples]) -> None:
        self.__dict__.update(suite.__dict__)
        self._exemplars = exemplars

    def samples(self, name: str, split: str) -> Samples:
        kept = self._exemplars.get(name) if split == "train" else None
        return kept or super().samples(name, split)


def icarl(stream: Stream) -> dict[str, list[float]]:
    """R_{N,i} by classifier, the nearest mean being that of the exemplars."""
    suite = stream.suite
    budget = PER_CLASS * sum(len(suite.task(t).labels or ()) for t in stream.tasks)
    training = replace(stream.training, lwf=1.0, temperature=1.0)
    ranked: dict[str, dict[int, Tensor]] = {}  # of each class of a task, its exemplars' rows, best first
    exemplars: dict[str, Samples] = {}
    params: Params = stream.base
    for k, task in enumerate(stream.tasks, 1):
        seen = stream.tasks[:k]
        # All classes seen are told apart; the old ones are distilled from the model before.
        start = params if k > 1 else None
        params = finetune(Rehearsed(suite, exemplars), seen, None, training, start=start, learned=seen[:-1]).params
        ranked[task] = herd(suite, params, suite.samples(task, "train"), budget)
        each = budget // sum(map(len, ranked.values()))
        for name, classes in ranked.items():
            rows = torch.cat([found[:each] for found in classes.values()])
            exemplars[name] = suite.samples(name, "train").rows(rows)
    left = Rehearsed(suite, exemplars)
    judged = {c: left.judge(params, stream.tasks, stream.tasks, classifier=c) for c in CLASSIFIERS}
    return {classifier: [accuracy for accuracy, _ in found] for classifier, found in judged.items()}


def herd(suite: Suite, params: Params, samples: Samples, most: int) -> dict[int, Tensor]:
    """Rows of each class whose running mean feature stays closest to that of the class, up to `most` (Algorithm 4, iCaRL)."""
    with torch.no_grad():
        blocks = [samples.rows(slice(i, i + 64)) for i in range(0, len(samples), 64)]
        features = functional.normalize(torch.cat([suite.encoder.features(params, b.inputs) for b in blocks]), dim=-1)
    chosen = {}
    for label in samples.labels.unique().tolist():
        rows = (samples.labels == label).nonzero().flatten()
        mine, total, order = features[rows], torch.zeros(features.shape[1]), list[int]()
        mean = mine.mean(0)
        for count in range(1, min(most, len(rows)) + 1):
            distance = (mean - (total + mine) / count).norm(dim=-1)
            distance[order] = torch.inf
            order.append(int(distance.argmin()))
            total = total + mine[order[-1]]
        chosen[label] = rows[order]
    return chosen
