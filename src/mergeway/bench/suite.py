"""A benchmark's models and data, and how a model is judged on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.judge import in_full, judge, judge_samples
from mergeway.calibration.questions import Asked, read_asked
from mergeway.calibration.samples import DEFAULT_SIZE, Samples, draw, require_labels
from mergeway.calibration.suite import SuiteData, lines_of
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.kinds import CausalLM
from mergeway.model.model import Encoder
from mergeway.model.tangent import Tangent


class Suite(SuiteData):
    """A suite's data with the judging of models on it.

    `tests` limits the test examples of each task, for a look that has to be quick; `compute` says how the model is run.
    """

    def __init__(self, path: str | Path, tests: int | None = None, compute: Compute | None = None) -> None:
        super().__init__(path, compute)
        self.tests = tests
        self._asked: dict[str, Asked] = {}

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
        through: Encoder | Tangent | None = None,
        classifier: str | None = None,
    ) -> list[tuple[float, float]]:
        """Accuracy in percent and mean cross-entropy on each task's test data; half precision is computed with in float32.

        The accuracy is that of the label, and with a language model what the task is judged by: choices, exact match or next tokens.

        With a shared head the choice is among the classes of the tasks `seen`, by default of all, and a test image does not
        say which task it is from. A_N (Section 5.1, Holistic CMM) is the mean accuracy over all tasks after the last.
        `through` is another reading of the parameters than the suite's own model, such as the tangent model.
        """
        if isinstance(self.model, CausalLM) and through is None:
            return [self._judge_texts(self.model, params, name) for name in names]
        model = through or self.encoder
        params = in_full(model, params)
        with torch.no_grad():
            head, open_classes = self._shared_head(
                model, params, list(seen or [t.name for t in self.tasks]), classifier or self.classifier
            )
        found: list[tuple[float, float]] = []
        for name in names:
            test = self.samples(name, "test").rows(slice(self.tests))
            test = test if head is None else replace(test, head=head)
            loss, accuracy = judge_samples(model, params, test, batch, open_classes)
            found.append((accuracy, loss))
        return found

    def _judge_texts(self, model: CausalLM, params: Mapping[str, Tensor], name: str) -> tuple[float, float]:
        asked = self.asked(name, model)
        asked = Asked(asked.questions[: self.tests], asked.choices[: self.tests])
        score = judge(model, params, self.samples(name, "test").rows(slice(self.tests)), asked)
        return float(getattr(score, self.task(name).measure or score.measure)), score.loss

    def asked(self, name: str, model: CausalLM) -> Asked:
        """What a task asks a language model, as far as it is judged by that; answers take many passes, next tokens one."""
        if name not in self._asked:
            task = self.task(name)
            found = Asked() if task.measure == "accuracy" else read_asked(lines_of(task, "test"), model)
            kinds = {"exact": found.questions, "choices": found.choices}
            if not kinds.get(task.measure or "", True):
                raise OptionError(
                    f"{lines_of(task, 'test')}: task '{name}' is to be judged by {task.measure}, but nothing in it asks for that"
                )
            self._asked[name] = found
        return self._asked[name]

    def _shared_head(
        self, model: Encoder | Tangent, params: Mapping[str, Tensor], seen: list[str], classifier: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """The head all tasks are judged with, and which of its classes may be chosen; neither where each has its own."""
        if self.protocol == "task":
            return None, None
        head = self.head(seen[0])
        if classifier == "nearest-mean":
            samples = [draw(self.samples(name, "train"), DEFAULT_SIZE) for name in seen]
            return mean_features(model, params, samples, len(head))
        chosen = torch.zeros(len(head), dtype=torch.bool)
        for name in seen:
            labels = self.task(name).labels
            chosen[list(labels) if labels is not None else slice(None)] = True
        return head, chosen


def load_suite(path: str | Path, tests: int | None = None, compute: Compute | None = None) -> Suite:
    """The suite in a directory."""
    return Suite(path, tests, compute)


def mean_features(
    model: Encoder | Tangent, params: Mapping[str, Tensor], tasks: Sequence[Samples], classes: int
) -> tuple[Tensor, Tensor]:
    """The nearest-mean classifier: each class's mean feature, of length 1, and which classes have any samples."""
    sums, counts = torch.zeros(classes, model.width), torch.zeros(classes)
    for task in tasks:
        require_labels(task, "class means need them")
        for start in range(0, len(task), 64):
            samples = task.rows(slice(start, start + 64))
            sums.index_add_(0, samples.labels, model.features(params, samples.inputs))
            counts.index_add_(0, samples.labels, torch.ones(len(samples)))
    return functional.normalize(sums, dim=-1), counts > 0
