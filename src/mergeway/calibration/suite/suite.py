"""The models and data of a benchmark, and how a model is judged on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.hub import read_hub
from mergeway.calibration.objective import Objective
from mergeway.calibration.readers import read_head, read_jsonl, read_npz
from mergeway.calibration.samples import DEFAULT_SIZE, Samples, draw
from mergeway.calibration.suite.task import SuiteTask
from mergeway.errors import OptionError, suggest
from mergeway.model.compute import Compute
from mergeway.model.encoders import ClipVision, TextEncoder, make_predictor, mean_features


class Suite:
    """A benchmark's models and data; everything is read when first needed and kept.

    `tests` limits the test examples of each task, for a look that has to be quick; `compute` says how the model is run.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        tasks: list[SuiteTask],
        tests: int | None = None,
        compute: Compute | None = None,
    ) -> None:
        self.path, self.settings, self.tasks, self.tests = path, settings, tasks, tests
        self.name: str = settings["name"]
        self.kind: str = settings["kind"]
        self.base = path / settings["base"]
        self.protocol: str = settings.get("protocol", "task")
        self.classifier: str = settings.get("classifier", "head")
        self.compute = compute or Compute()
        self._samples: dict[tuple[str, str], Samples] = {}

    @cached_property
    def predictor(self) -> ClipVision | TextEncoder:
        """The suite's model as a function of parameters."""
        return make_predictor(self.base, self.settings, self.compute)

    def task(self, name: str) -> SuiteTask:
        """The task of that name."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise OptionError(f"suite '{self.name}' has no task '{name}'; {suggest(name, [t.name for t in self.tasks])}")

    def samples(self, name: str, split: str) -> Samples:
        """The train or test examples of a task, prepared for the model."""
        key = (name, split)
        if key not in self._samples:
            task = self.task(name)
            head = read_head(task.head, self.predictor.width)
            if not isinstance(self.predictor, ClipVision):
                file = task.data.with_name(f"{task.data.name}.{split}.jsonl")
                made = read_jsonl(file, task.name, head, self.predictor)
            elif task.data.suffix == ".json":
                made = read_hub(task.data, split, task.name, head, self.predictor.image_size)
            else:
                made = read_npz(task.data, split, task.name, head, self.predictor)
            if task.labels is not None:
                _check_labels(task, made)
            self._samples[key] = made
        return self._samples[key]

    def objective(
        self, order: list[str], weights: list[float] | None = None, size: int = DEFAULT_SIZE, seed: int = 0
    ) -> Objective:
        """The loss on calibration samples of these tasks, from their training data only."""
        return Objective(self.predictor, [self.samples(n, "train") for n in order], weights, size=size, seed=seed)

    def accuracy(self, params: Mapping[str, Tensor], name: str, seen: Sequence[str] | None = None) -> float:
        """Top-1 accuracy on a task's test data, in percent; see `accuracies`."""
        return self.accuracies(params, [name], seen)[0]

    def accuracies(
        self,
        params: Mapping[str, Tensor],
        names: Sequence[str],
        seen: Sequence[str] | None = None,
        batch: int | None = None,
    ) -> list[float]:
        """Top-1 accuracy on each task's test data, in percent; see `judge`."""
        return [accuracy for accuracy, _ in self.judge(params, names, seen, batch)]

    def judge(
        self,
        params: Mapping[str, Tensor],
        names: Sequence[str],
        seen: Sequence[str] | None = None,
        batch: int | None = None,
        *,
        through: Any = None,
        classifier: str | None = None,
    ) -> list[tuple[float, float]]:
        """Top-1 accuracy in percent and mean cross-entropy on each task's test data; half precision is computed with in float32.

        With a shared head the choice is among the classes of the tasks `seen`, by default of all, and a test image does not
        say which task it is from. A_N (Section 5.1, Holistic CMM) is the mean accuracy over all tasks after the last.
        `through` is another reading of the parameters than the suite's own model, such as the tangent model.
        """
        params = self.compute.put({n: p.float() if p.is_floating_point() else p for n, p in params.items()})
        batch = batch or self.compute.micro_batch or 32
        predict = through or self.predictor
        with torch.no_grad():
            head, open_classes = self._shared_head(
                predict, params, list(seen or [t.name for t in self.tasks]), classifier or self.classifier
            )
            return [self._judge_task(predict, params, name, head, open_classes, batch) for name in names]

    def _judge_task(
        self,
        predict: Any,
        params: Mapping[str, Tensor],
        name: str,
        head: Tensor | None,
        open_classes: Tensor | None,
        batch: int,
    ) -> tuple[float, float]:
        test = self.samples(name, "test").rows(slice(self.tests)).by_length()
        hits, loss = 0, 0.0
        for start in range(0, len(test), batch):
            rows = test.rows(slice(start, start + batch)).trimmed()
            logits = predict(params, rows.inputs, rows.head if head is None else head)
            if open_classes is not None:
                logits = logits.masked_fill(~open_classes, -torch.inf)
            hits += int((logits.argmax(-1) == rows.labels).sum())
            loss += float(functional.cross_entropy(logits, rows.labels, reduction="sum"))
        return 100.0 * hits / len(test), loss / len(test)

    def _shared_head(
        self, predict: Any, params: Mapping[str, Tensor], seen: list[str], classifier: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """The head all tasks are judged with, and which of its classes may be chosen; neither where each has its own."""
        if self.protocol == "task":
            return None, None
        head = read_head(self.task(seen[0]).head, self.predictor.width)
        if classifier == "nearest-mean":
            samples = [draw(self.samples(name, "train"), DEFAULT_SIZE) for name in seen]
            return mean_features(predict, params, samples, len(head))
        chosen = torch.zeros(len(head), dtype=torch.bool)
        for name in seen:
            labels = self.task(name).labels
            chosen[list(labels) if labels is not None else slice(None)] = True
        return head, chosen


def _check_labels(task: SuiteTask, samples: Samples) -> None:
    others = set(samples.labels.unique().tolist()) - set(task.labels or ())
    if others:
        raise OptionError(
            f"{task.data}: class {min(others)} is not among the labels of task '{task.name}' in suite.json"
        )
