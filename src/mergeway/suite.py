"""A suite: the base, experts, heads and data of a benchmark, described by a directory's suite.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergeway.calibration import DEFAULT_SIZE, Samples, check_samples
from mergeway.checkpoint import SafetensorsFiles
from mergeway.checkpoint.source import read_json
from mergeway.errors import OptionError, suggest
from mergeway.objective import Objective
from mergeway.predictors import ClipVision, TextEncoder

KINDS = {"clip-vision": ("logit_scale", "image_mean", "image_std"), "text-encoder": ("logit_scale", "max_length")}


@dataclass(frozen=True)
class SuiteTask:
    """One task: the expert that arrives, the data it is judged on, and its frozen head."""

    name: str
    expert: Path
    data: Path
    head: Path


class Suite:
    """A benchmark's models and data; everything is read when first needed and kept."""

    def __init__(self, path: Path, settings: Mapping[str, Any], tasks: list[SuiteTask]) -> None:
        self.path, self.settings, self.tasks = path, settings, tasks
        self.name: str = settings["name"]
        self.kind: str = settings["kind"]
        self.base = path / settings["base"]
        self._samples: dict[tuple[str, str], Samples] = {}

    @cached_property
    def predictor(self) -> ClipVision | TextEncoder:
        """The suite's model as a function of parameters."""
        s = self.settings
        if self.kind == "clip-vision":
            return ClipVision(self.base, s["logit_scale"], s["image_mean"], s["image_std"])
        return TextEncoder(self.base, s["logit_scale"], s["max_length"], s.get("pooling", "mean"))

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
            head = _read_head(task.head, self.predictor.width)
            made = (
                self._read_images(task, split, head)
                if self.kind == "clip-vision"
                else self._read_texts(task, split, head)
            )
            check_samples(made, f"{task.data} ({split})")
            self._samples[key] = made
        return self._samples[key]

    def objective(
        self, order: list[str], weights: list[float] | None = None, size: int = DEFAULT_SIZE, seed: int = 0
    ) -> Objective:
        """The loss on calibration samples of these tasks, from their training data only."""
        return Objective(self.predictor, [self.samples(n, "train") for n in order], weights, size=size, seed=seed)

    def accuracy(self, params: Mapping[str, Tensor], name: str, batch: int = 256) -> float:
        """Top-1 accuracy on a task's test data, in percent."""
        test = self.samples(name, "test")
        hits = 0
        with torch.no_grad():
            for start in range(0, len(test), batch):
                rows = test.rows(slice(start, start + batch))
                hits += int((self.predictor(params, rows.inputs, rows.head).argmax(-1) == rows.labels).sum())
        return 100.0 * hits / len(test)

    def _read_images(self, task: SuiteTask, split: str, head: Tensor) -> Samples:
        predictor = self.predictor
        assert isinstance(predictor, ClipVision)
        arrays = _read_npz(task.data)
        for key in (f"x_{split}", f"y_{split}"):
            if key not in arrays:
                raise OptionError(
                    f"{task.data}: has no array '{key}'; it holds {', '.join(sorted(arrays)) or 'nothing'}"
                )
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        size = predictor.image_size
        if x.dtype != np.uint8 or x.ndim != 4 or x.shape[1:] != (size, size, 3):
            raise OptionError(
                f"{task.data}: x_{split} is {x.dtype} {list(x.shape)}; the model takes uint8 images [n, {size}, {size}, 3]"
            )
        return Samples(
            task.name, {"images": torch.from_numpy(x)}, torch.from_numpy(y.astype(np.int64)).reshape(-1), head
        )

    def _read_texts(self, task: SuiteTask, split: str, head: Tensor) -> Samples:
        predictor = self.predictor
        assert isinstance(predictor, TextEncoder)
        path = task.data.with_name(f"{task.data.name}.{split}.jsonl")
        rows = _read_rows(path)
        texts, labels = [text for text, _ in rows], [label for _, label in rows]
        inputs = predictor.encode(texts) if texts else {}
        return Samples(task.name, inputs, torch.tensor(labels, dtype=torch.int64), head)


def load_suite(path: str | Path) -> Suite:
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
    return Suite(path, settings, tasks)


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


def _read_head(path: Path, width: int) -> Tensor:
    file = SafetensorsFiles(str(path), [path])
    if "weight" not in file.infos:
        raise OptionError(
            f"{path}: a head holds a tensor 'weight'; this file holds {', '.join(file.infos) or 'nothing'}"
        )
    head = file.read("weight").float()
    if head.ndim != 2 or head.shape[1] != width:
        raise OptionError(
            f"{path}: the head is {list(head.shape)}; the model's features have width {width}, so it must be [classes, {width}]"
        )
    return head


def _read_rows(path: Path) -> list[tuple[str, int]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise OptionError(f"{path}: cannot be read ({problem.strerror})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append((str(row["text"]), int(row["label"])))
        except (ValueError, KeyError, TypeError):
            raise OptionError(f"{path}, line {number}: expected an object with 'text' and an integer 'label'") from None
    return rows


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except OSError as problem:
        raise OptionError(f"{path}: cannot be read ({problem.strerror or problem})") from None
    except Exception as problem:
        raise OptionError(f"{path}: not a readable npz file ({' '.join(str(problem).split())[:120]})") from None
