"""What a suite directory must hold before anything is measured on it."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import torch

from mergeway.bench.suite import Suite, load_suite
from mergeway.calibration.suite import SuiteTask
from mergeway.checkpoint import check_fits, inspect_checkpoint, open_checkpoint
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.kinds import CausalLM


class TaskSize(TypedDict):
    """What a task holds."""

    task: str
    classes: int | None  # a language model has none
    train: int
    test: int


def check_suite(path: str | Path, compute: Compute | None = None) -> list[TaskSize]:
    """Read all of a suite and raise at the first thing that is wrong; says what each task holds."""
    suite = load_suite(path, compute=compute)
    base = open_checkpoint(suite.base)
    seen = inspect_checkpoint(base)
    sizes: list[TaskSize] = []
    for task in suite.tasks:
        train, test = (len(suite.samples(task.name, split)) for split in ("train", "test"))
        classes = None if task.head is None else _check_head(suite, task, task.head)
        if isinstance(suite.model, CausalLM):
            suite.asked(task.name, suite.model)
        if task.arrives is not None:
            expert = open_checkpoint(task.arrives, base)
            check_fits(base, seen, expert, inspect_checkpoint(expert))
        sizes.append({"task": task.name, "classes": classes, "train": train, "test": test})
    return sizes


def _check_head(suite: Suite, task: SuiteTask, path: Path) -> int:
    """How many classes a task has; the logits are scaled cosines only when every row of its head has length 1."""
    head = suite.head(task.name)
    if task.labels is not None and not all(0 <= y < len(head) for y in task.labels):
        raise OptionError(f"{path}: has {len(head)} rows, but task '{task.name}' names class {max(task.labels)}")
    off = float((torch.linalg.vector_norm(head, dim=-1) - 1).abs().max())
    if off > 1e-3:
        raise OptionError(f"{path}: the rows must have length 1, but one is off by {off:.2g}; normalise them")
    return len(task.labels or head)
