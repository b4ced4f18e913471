"""What a stream lies between: the accuracies and the losses of the base, and of each task's own expert."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mergeway.bench.suite import Suite
from mergeway.checkpoint import open_checkpoint
from mergeway.core.progress import SILENT, Progress

# By task: the accuracies of "base" and "experts"; the losses, "base_loss" and "experts_loss", where a run has them.
Ends = dict[str, dict[str, float]]


def end_accuracies(suite: Suite, progress: Progress = SILENT) -> Ends:
    """The accuracies and the losses of the base and of each task's own expert."""
    start = open_checkpoint(suite.base)

    def tensors(path: Path) -> dict[str, Tensor]:
        checkpoint = open_checkpoint(path, start)  # an expert may be an adapter
        return {name: checkpoint.read(name) for name in checkpoint.infos}

    base = tensors(suite.base)
    ends: Ends = {"base": {}, "experts": {}, "base_loss": {}, "experts_loss": {}}
    progress.begin("judging base and experts", len(suite.tasks), "tasks")
    for task in suite.tasks:
        for side, params in (("base", base), ("experts", tensors(task.expert))):
            ((accuracy, loss),) = suite.judge(params, [task.name])
            ends[side][task.name], ends[f"{side}_loss"][task.name] = accuracy, loss
        progress.advance(1)
    return ends


def end_losses(ends: Ends) -> Ends:
    """The losses of "base" and "experts"; none of a run of an earlier version."""
    return {side: ends[f"{side}_loss"] for side in ("base", "experts") if f"{side}_loss" in ends}
