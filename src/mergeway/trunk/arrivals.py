"""An arrival at the door of a trunk: its name, its record, whether it came before, and the data it brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mergeway.calibration.samples import DEFAULT_SIZE, Samples, draw
from mergeway.calibration.task_data import task_data
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.heads import Head
from mergeway.errors import OptionError, TrunkError
from mergeway.fold.prepare import Arrival, Base
from mergeway.model.compute import Compute
from mergeway.model.own_head import make_model
from mergeway.trunk.journal import Folded, Journal, Record, now


def record_of(journal: Journal, kind: str, arrival: Arrival) -> Record:
    """The record of a change by this arrival, without its result."""
    return Record(
        step=len(journal.records),
        kind=kind,
        result="",
        time=now(),
        task=arrival.task,
        source=arrival.checkpoint.source,
        digest=arrival.seen.digest,
        weight=arrival.weight,
    )


def task_name(task: str | None, checkpoint: Checkpoint, held: list[Folded]) -> str:
    """The name asked for, if it is free; else one after the checkpoint's own."""
    taken = {f.task for f in held}
    if task is not None:
        if task in taken:
            raise TrunkError(f"task '{task}' is part of the deployed model already; give the arrival another --task")
        if not task or not task.isprintable():
            raise OptionError(f"task name {task!r}: it must be printable and not empty")
        return task
    stem = "".join(c if c.isprintable() else "_" for c in Path(checkpoint.source).stem) or "arrival"
    number, name = 1, stem
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def refuse_twice(arrival: Arrival, held: list[Folded], again: bool) -> None:
    """Weights that the deployed model holds already are most often a slip."""
    for folded in held:
        if folded.digest == arrival.seen.digest and not again:
            raise TrunkError(
                f"{arrival.checkpoint.source}: the same weights were folded in at step {folded.step} as '{folded.task}'; pass --again to count them once more"
            )


def read_data(
    data: str,
    head: str | Path | None,
    task: str,
    base: Base,
    compute: Compute | None = None,
    own: Head | None = None,
) -> tuple[Any, Samples]:
    """The model as a function of parameters, and the labelled samples of one task under the head it came with, if any."""
    directory = base.checkpoint.directory
    if directory is None:
        raise OptionError(f"data can be used with a base that is a model directory, not {base.checkpoint.source}")
    settings, samples = task_data(data, Path(head) if head else None, task, directory, own.tensors if own else None)
    return make_model(directory, settings, compute), draw(samples, DEFAULT_SIZE)
