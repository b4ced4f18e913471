"""Calibration samples: a few labelled examples of each seen task, drawn by seed, the same whatever the rule."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mergeway.errors import OptionError

DEFAULT_SIZE = 1024


@dataclass(frozen=True)
class Samples:
    """Labelled examples of one task: inputs as the model takes them, row by row, and the task's frozen head if it has one."""

    task: str
    inputs: Mapping[str, Tensor]
    labels: Tensor
    head: Tensor | None = None
    shuffled: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, index: slice | Tensor) -> Samples:
        """Some of the examples."""
        return replace(self, inputs={k: v[index] for k, v in self.inputs.items()}, labels=self.labels[index])


def check_samples(samples: Samples, where: str, classes: int | None = None) -> None:
    """Refuse data that no loss can be computed on."""
    if len(samples) == 0:
        raise OptionError(f"{where}: there are no samples")
    for name, rows in samples.inputs.items():
        if len(rows) != len(samples):
            raise OptionError(f"{where}: {len(rows)} rows of '{name}' for {len(samples)} labels")
    count = len(samples.head) if samples.head is not None else classes
    low, high = int(samples.labels.min()), int(samples.labels.max())
    if low < 0 or (count is not None and high >= count):
        bad = low if low < 0 else high
        raise OptionError(
            f"{where}: label {bad} is out of range; the head has {count} classes, 0 to {(count or 1) - 1}"
        )


def shares(size: int, tasks: int) -> list[int]:
    """n samples over k tasks: n/k each, the first ones taking what is left over."""
    if tasks and size < tasks:
        raise OptionError(f"{size} calibration samples for {tasks} tasks: each task needs at least one")
    return [size // tasks + (i < size % tasks) for i in range(tasks)]


def draw(samples: Samples, count: int, seed: int = 0) -> Samples:
    """The first `count` of the task's shuffled samples: a smaller draw is always part of a larger one."""
    if not samples.shuffled:
        key = hashlib.sha256(f"{seed}:{samples.task}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        samples = replace(samples.rows(torch.randperm(len(samples), generator=generator)), shuffled=True)
    return samples.rows(slice(count))
