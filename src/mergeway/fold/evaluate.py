"""What any checkpoint is worth on the data of tasks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mergeway.calibration.given import Data, HeadByTask, heads_by_task
from mergeway.calibration.judge import Score
from mergeway.calibration.trial import Heads, read_trials, scores
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.heads import head_of, head_pattern
from mergeway.checkpoint.resolve import Reference
from mergeway.core.pool import worker_pool
from mergeway.errors import OptionError
from mergeway.fold.prepare import prepare_arrival, prepare_base
from mergeway.model.compute import Compute


def evaluate(
    ref: Reference,
    data: Mapping[str, Data],
    *,
    head: HeadByTask = None,
    base: Reference | None = None,
    compute: Compute | None = None,
    allow_pickle: bool = False,
) -> dict[str, Score]:
    """Judge a checkpoint on the test data of each task, with the head it has, or a frozen one from a file in `head`.

    A checkpoint that is no model directory, such as an adapter, is judged on the `base` that it was tuned from.
    """
    files = heads_by_task(head, next(iter(data), ""))
    if base is None:
        found = open_checkpoint(ref, allow_pickle=allow_pickle)
        if found.directory is None or not (found.directory / "config.json").exists():
            raise OptionError(
                f"{found.source}: has no config.json, so nothing says how to run it; name the model directory it was tuned from with --base"
            )
        params: dict[str, Tensor] = {n: found.read(n) for n, info in found.infos.items() if info.merges}
        return scores(read_trials(data, found.directory, Heads(files), compute), params)
    opened = open_checkpoint(base, allow_pickle=allow_pickle)
    found = open_checkpoint(ref, opened, allow_pickle)
    pattern = head_pattern(opened, None)
    with worker_pool() as pool:
        prepared = prepare_base(opened, pool, heads=pattern)
        arrival = prepare_arrival(prepared, found, 1.0, found.source, pool)
    own = {task: head_of(found, pattern) for task in data} if pattern else {}
    params = {name: arrival.read(name) for name in prepared.merged_infos}
    return scores(read_trials(data, opened.directory, Heads(files, own), compute), params)
