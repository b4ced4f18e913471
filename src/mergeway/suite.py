"""A suite: the base, experts, heads and data of a benchmark, described by a directory's suite.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergeway.calibration import DEFAULT_SIZE, Samples
from mergeway.checkpoint.source import read_json
from mergeway.data import base_settings, read_data, read_head, read_jsonl, read_npz
from mergeway.errors import OptionError, suggest
from mergeway.objective import Objective
from mergeway.predictors import KINDS, ClipVision, TextEncoder, make_predictor


@dataclass(frozen=True)
class SuiteTask:
    """One task: the expert that arrives, the data it is judged on, and its frozen head."""

    name: str
    expert: Path
    data: Path
    head: Path


class Suite:
    """A benchmark's models and data; everything is read when first needed and kept.

    `tests` limits the test examples of each task, for a look that has to be quick.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], tasks: list[SuiteTask], tests: int | None = None
    ) -> None:
        self.path, self.settings, self.tasks, self.tests = path, settings, tasks, tests
        self.name: str = settings["name"]
        self.kind: str = settings["kind"]
        self.base = path / settings["base"]
        self._samples: dict[tuple[str, str], Samples] = {}

    @cached_property
    def predictor(self) -> ClipVision | TextEncoder:
        """The suite's model as a function of parameters."""
        return make_predictor(self.base, self.settings)

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
            if isinstance(self.predictor, ClipVision):
                made = read_npz(task.data, split, task.name, head, self.predictor)
            else:
                made = read_jsonl(
                    task.data.with_name(f"{task.data.name}.{split}.jsonl"), task.name, head, self.predictor
                )
            self._samples[key] = made
        return self._samples[key]

    def objective(
        self, order: list[str], weights: list[float] | None = None, size: int = DEFAULT_SIZE, seed: int = 0
    ) -> Objective:
        """The loss on calibration samples of these tasks, from their training data only."""
        return Objective(self.predictor, [self.samples(n, "train") for n in order], weights, size=size, seed=seed)

    def accuracy(self, params: Mapping[str, Tensor], name: str, batch: int = 64) -> float:
        """Top-1 accuracy on a task's test data, in percent; half precision is computed with in float32."""
        params = {n: p.float() if p.is_floating_point() else p for n, p in params.items()}
        test = self.samples(name, "test").rows(slice(self.tests))
        hits = 0
        with torch.no_grad():
            for start in range(0, len(test), batch):
                rows = test.rows(slice(start, start + batch))
                hits += int((self.predictor(params, rows.inputs, rows.head).argmax(-1) == rows.labels).sum())
        return 100.0 * hits / len(test)


def load_suite(path: str | Path, tests: int | None = None) -> Suite:
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
    names = [t.name for t in tasks]
    if len(set(names)) < len(names):
        raise OptionError(f"{file}: two tasks have the name '{next(n for n in names if names.count(n) > 1)}'")
    if not (path / settings["base"]).exists():
        raise OptionError(f"{file}: the base {path / settings['base']} does not exist")
    return Suite(path, settings, tasks, tests)


def _read_task(file: Path, path: Path, number: int, row: Any) -> SuiteTask:
    if not isinstance(row, dict):
        raise OptionError(f"{file}: task {number} is not an object")
    for key in ("name", "expert", "data", "head"):
        if not isinstance(row.get(key), str):
            raise OptionError(f"{file}: task {number} has no text entry '{key}'")
    for key in ("expert", "head"):
        if not (path / row[key]).exists():
            raise OptionError(f"{file}: {key} {path / row[key]} of task '{row['name']}' does not exist")
    return SuiteTask(row["name"], path / row["expert"], path / row["data"], path / row["head"])


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
