"""What keeps a fine-tuned model near where it started: distillation (LwF) or a quadratic penalty (EWC)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.loss import Predict
from mergeway.calibration.samples import DEFAULT_SIZE, Samples, draw
from mergeway.calibration.statistics import fisher_diagonal, fisher_of_batches
from mergeway.checkpoint import SafetensorsFiles
from mergeway.checkpoint.writer import save_tensors
from mergeway.errors import CheckpointError
from mergeway.train.training import Training

FISHER = "fisher.safetensors"
DECAY = 0.5  # what the Fisher information of earlier tasks counts against the latest

Params = Mapping[str, Tensor]


def distillation(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """LwF: the cross-entropy of the answers against those of the model at the start, both softened."""
    return functional.cross_entropy(logits / temperature, (taught / temperature).softmax(-1))


def penalty(params: Params, anchor: Params, fisher: Params) -> Tensor:
    """EWC: ½ Σ F (θ − θ_start)²."""
    terms = [(fisher[n] * (params[n] - anchor[n]).square()).sum() for n in fisher if n in params]
    return 0.5 * torch.stack(terms).sum()


def read_fisher(start: Path | None, params: Params) -> dict[str, Tensor]:
    """The Fisher information that came with the start; none at the first task."""
    path = start / FISHER if start is not None else None
    if path is None or not path.exists():
        return {}
    file = SafetensorsFiles(str(path), [path])
    for name, info in file.infos.items():
        if name not in params or info.shape != tuple(params[name].shape):
            raise CheckpointError(f"{path}: '{name}' does not fit the model; it is another model's Fisher information")
    return {name: file.read(name) for name in file.infos}


def running_fisher(
    predict: Predict, params: Params, tasks: list[Samples], before: Params, how: Training
) -> dict[str, Tensor]:
    """The Fisher information after this task: that of its own samples, averaged with what was known before.

    As released (`per-batch`) the average begins with nothing known, so that the first task's counts half.
    """
    new: dict[str, Tensor] = {}
    for task in tasks:
        samples = draw(task, DEFAULT_SIZE // len(tasks))
        if how.ewc_fisher == "per-batch":
            squares = fisher_of_batches(predict, params, samples, how.batch)
        else:
            squares = fisher_diagonal(predict, params, samples)
        for name, square in squares.items():
            new[name] = new.get(name, 0) + square / len(tasks)
    if how.ewc_fisher == "per-sample" and not before:
        return new
    return {name: DECAY * before.get(name, 0) + (1 - DECAY) * v for name, v in new.items()}


def write_fisher(path: Path, fisher: Params) -> None:
    """The Fisher information beside the weights, for the next task."""
    save_tensors(path, fisher)
