"""A suite: the base, experts, heads and data of a benchmark, described by a directory's suite.json.

Its protocol says what is asked: `task`, each task among its own classes under its own head; `cil`, tasks of disjoint classes,
and `dil`, tasks of the same classes in other domains, both under one shared head, among all classes seen so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration import DEFAULT_SIZE, Samples, draw
from mergeway.checkpoint.source import read_json
from mergeway.compute import Compute
from mergeway.data import base_settings, read_data, read_head, read_hub, read_jsonl, read_npz
from mergeway.errors import OptionError, suggest
from mergeway.objective import Objective
from mergeway.predictors import KINDS, ClipVision, TextEncoder, make_predictor, mean_features

PROTOCOLS = ("task", "cil", "dil")
CLASSIFIERS = ("head", "nearest-mean")


@dataclass(frozen=True)
class SuiteTask:
    """One task: the expert that arrives, the data it is judged on, its frozen head, and which of the head's rows are its own."""

    name: str
    arrives: Path | None
    data: Path
    head: Path
    labels: tuple[int, ...] | None = None

    @property
    def expert(self) -> Path:
        """The task's expert; a suite may leave it to be trained."""
        if self.arrives is None:
            raise OptionError(
                f"task '{self.name}' comes without an expert; train one with 'mergeway finetune', and name it as 'expert' in suite.json"
            )
        return self.arrives

    def is_of(self, ref: str | Path) -> bool:
        """Whether a checkpoint is the task's expert, or a directory named after the task."""
        path = Path(ref)
        return path.name == self.name or (self.arrives is not None and path.resolve() == self.arrives.resolve())


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


def load_suite(path: str | Path, tests: int | None = None, compute: Compute | None = None) -> Suite:
    """The suite in a directory, checked for everything that can be checked without reading the weights."""
    path = Path(path)
    file = path / "suite.json"
    if not file.exists():
        raise OptionError(f"{path}: not a suite (no suite.json)")
    settings = read_json(file, "the suite's description")
    for key in ("name", "kind", "base", "tasks"):
        if key not in settings:
            raise OptionError(f"{file}: the entry '{key}' is missing")
    if settings["kind"] not in KINDS:
        raise OptionError(f"{file}: kind '{settings['kind']}' is unknown; {suggest(str(settings['kind']), KINDS)}")
    for key in KINDS[settings["kind"]]:
        if key not in settings:
            raise OptionError(f"{file}: a suite of kind {settings['kind']} needs the entry '{key}'")
    if not isinstance(settings["tasks"], list) or not settings["tasks"]:
        raise OptionError(f"{file}: 'tasks' must be a list with at least one task")
    tasks = [_read_task(file, path, number, row) for number, row in enumerate(settings["tasks"])]
    _check_protocol(file, settings, tasks)
    names = [t.name for t in tasks]
    if len(set(names)) < len(names):
        raise OptionError(f"{file}: two tasks have the name '{next(n for n in names if names.count(n) > 1)}'")
    if not (path / settings["base"]).exists():
        raise OptionError(f"{file}: the base {path / settings['base']} does not exist")
    return Suite(path, settings, tasks, tests, compute)


def _read_task(file: Path, path: Path, number: int, row: Any) -> SuiteTask:
    if not isinstance(row, dict):
        raise OptionError(f"{file}: task {number} is not an object")
    for key in ("name", "data", "head", *(["expert"] if "expert" in row else [])):
        if not isinstance(row.get(key), str):
            raise OptionError(f"{file}: task {number} has no text entry '{key}'")
    for key in ("expert", "head"):
        if key in row and not (path / row[key]).exists():
            raise OptionError(f"{file}: {key} {path / row[key]} of task '{row['name']}' does not exist")
    labels = row.get("labels")
    if labels is not None and not (isinstance(labels, list) and labels and all(type(y) is int for y in labels)):
        raise OptionError(f"{file}: 'labels' of task '{row['name']}' must be a list of whole numbers, rows of the head")
    arrives = path / row["expert"] if "expert" in row else None
    return SuiteTask(
        row["name"], arrives, path / row["data"], path / row["head"], tuple(labels) if labels is not None else None
    )


def _check_protocol(file: Path, settings: Mapping[str, Any], tasks: Sequence[SuiteTask]) -> None:
    for key, known in (("protocol", PROTOCOLS), ("classifier", CLASSIFIERS)):
        said = settings.get(key, known[0])
        if said not in known:
            raise OptionError(f"{file}: {key} '{said}' is unknown; {suggest(str(said), known)}")
    protocol = settings.get("protocol", "task")
    if protocol == "task":
        return
    if len({t.head for t in tasks}) > 1:
        raise OptionError(f"{file}: a suite of protocol {protocol} has one head; name the same file in every task")
    if protocol == "cil":
        owner: dict[int, str] = {}
        for task in tasks:
            if task.labels is None:
                raise OptionError(
                    f"{file}: task '{task.name}' needs 'labels', the rows of the head that are its classes"
                )
            for label in task.labels:
                if label in owner:
                    raise OptionError(f"{file}: class {label} is in '{owner[label]}' and in '{task.name}'")
                owner[label] = task.name


def _check_labels(task: SuiteTask, samples: Samples) -> None:
    others = set(samples.labels.unique().tolist()) - set(task.labels or ())
    if others:
        raise OptionError(
            f"{task.data}: class {min(others)} is not among the labels of task '{task.name}' in suite.json"
        )


def arrival_data(data: str, head: Path | None, task: str, base: Path) -> tuple[dict[str, Any], Samples]:
    """What `--data` and `--head` stand for: how the model reads its inputs, and the task's labelled training data.

    DATA is a file or folder together with a head, or SUITE#TASK for a task of a suite, which brings its own.
    """
    where, _, name = data.partition("#")
    if (Path(where) / "suite.json").exists():
        suite = load_suite(where)
        samples = suite.samples(name or task, "train")
        return {
            "kind": suite.kind,
            **{k: suite.settings[k] for k in (*KINDS[suite.kind], "pooling") if k in suite.settings},
        }, replace(samples, task=task)
    if head is None:
        raise OptionError(
            f"--data {data}: the task's head is needed too; give --head FILE with a tensor 'weight' [classes, width]"
        )
    settings = base_settings(base, head)
    predictor = make_predictor(base, settings)
    return settings, read_data(Path(data), task, read_head(head, predictor.width), predictor)
