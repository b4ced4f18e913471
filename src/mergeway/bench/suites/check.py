"""What a suite directory must hold before anything is measured on it."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from mergeway.bench.suite import load_suite
from mergeway.calibration.readers import read_head
from mergeway.checkpoint import check_fits, inspect_checkpoint, open_checkpoint
from mergeway.errors import OptionError


class TaskSize(TypedDict):
    """What a task holds."""

    task: str
    classes: int
    train: int
    test: int


def check_suite(path: str | Path) -> list[TaskSize]:
    """Read all of a suite and raise at the first thing that is wrong; says what each task holds."""
    suite = load_suite(path)
    base = open_checkpoint(suite.base)
    seen = inspect_checkpoint(base)
    sizes: list[TaskSize] = []
    for task in suite.tasks:
        train, test = (len(suite.samples(task.name, split)) for split in ("train", "test"))
        head = read_head(task.head, suite.model.width)
        _check_lengths(task.head, head)
        if task.labels is not None and not all(0 <= y < len(head) for y in task.labels):
            raise OptionError(
                f"{task.head}: has {len(head)} rows, but task '{task.name}' names class {max(task.labels)}"
            )
        if task.arrives is not None:
            expert = open_checkpoint(task.arrives, base)
            check_fits(base, seen, expert, inspect_checkpoint(expert))
        sizes.append({"task": task.name, "classes": len(task.labels or head), "train": train, "test": test})
    return sizes


def _check_lengths(path: Path, head: Tensor) -> None:
    """The logits are scaled cosines only when every row has length 1."""
    off = float((torch.linalg.vector_norm(head, dim=-1) - 1).abs().max())
    if off > 1e-3:
        raise OptionError(f"{path}: the rows must have length 1, but one is off by {off:.2g}; normalise them")
