"""How a model is fine-tuned: the paper's numbers as defaults, checked when they are set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from mergeway.errors import OptionError, suggest

# The classes of a loss: a class-incremental task's own, or the whole head.
Classes = Literal["own", "all"]
# What LwF distils: the classes of earlier tasks, none at the first, or the whole head from the first task on.
LwfClasses = Literal["old", "all"]
# EWC's Fisher: squares of batch means on predicted labels, or of each sample's gradient on its own label.
EwcFisher = Literal["per-batch", "per-sample"]

Start = str | Path | Mapping[str, Tensor] | None  # an expert, a trunk or tensors; None is the base


@dataclass(frozen=True)
class Training:
    """AdamW with a cosine schedule, as Section 5.1 of Holistic CMM has it; `warmup` is a share of all steps."""

    epochs: int = 10
    steps: int | None = None
    lr: float = 1e-5
    weight_decay: float = 0.1
    batch: int = 128
    warmup: float = 0.1
    clip: float = 1.0
    seed: int = 0
    tangent: bool = False
    lwf: float = 0.0
    temperature: float = 2.0
    ewc: float = 0.0
    freeze: str | None = None
    classes: Classes = "own"
    lwf_classes: LwfClasses = "old"
    ewc_fisher: EwcFisher = "per-batch"
    lora: int = 0
    lora_alpha: float | None = None

    def __post_init__(self) -> None:
        lowest = {"epochs": 1, "batch": 1, "lr": 0, "weight_decay": 0, "lwf": 0, "ewc": 0, "lora": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not value >= low or math.isinf(value):
                raise OptionError(f"--{name.replace('_', '-')} is {value}; it must be at least {low} and finite")
        if self.steps is not None and self.steps < 1:
            raise OptionError(f"--steps is {self.steps}; it must be at least 1")
        if not 0 <= self.warmup <= 1:
            raise OptionError(f"--warmup is {self.warmup}; it is a share of the steps, from 0 to 1")
        for name in ("clip", "temperature"):
            if not getattr(self, name) > 0:
                raise OptionError(f"--{name} is {getattr(self, name)}; it must be positive")
        for name, known in (("classes", Classes), ("lwf_classes", LwfClasses), ("ewc_fisher", EwcFisher)):
            value, words = getattr(self, name), get_args(known)
            if value not in words:
                raise OptionError(f"--{name.replace('_', '-')} is '{value}'; {suggest(str(value), words)}")
        if self.lora_alpha is not None and not (self.lora and 0 < self.lora_alpha < math.inf):
            raise OptionError(f"--lora-alpha is {self.lora_alpha}; it must be positive, and goes with --lora RANK")
        if self.lora and (self.tangent or self.ewc):
            raise OptionError("--lora: factors are trained neither with --tangent nor with --ewc")
        if self.lwf and self.ewc:
            raise OptionError("--lwf and --ewc: give one of them")

    @property
    def alpha(self) -> float:
        """What scales an adapter, alpha/rank: 2 unless it was set."""
        return self.lora_alpha if self.lora_alpha is not None else 2.0 * self.lora

    def total_steps(self, examples: int) -> int:
        """The steps of a training on that many examples."""
        return self.steps if self.steps is not None else self.epochs * math.ceil(examples / self.batch)

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step, the first being 0: a straight rise, then half a cosine down to 0."""
        rise = math.ceil(self.warmup * total)
        if step < rise:
            return self.lr * (step + 1) / rise
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(total - rise, 1)))

    def batches(self, examples: int, start: int, total: int) -> Iterator[Tensor]:
        """The examples of each step from `start` on; every epoch is a shuffling that follows from the seed alone."""
        a_pass = math.ceil(examples / self.batch)
        order, epoch = torch.empty(0, dtype=torch.long), -1
        for step in range(start, total):
            if step // a_pass != epoch:
                epoch = step // a_pass
                generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
                order = torch.randperm(examples, generator=generator)
            at = step % a_pass * self.batch
            yield order[at : at + self.batch]
