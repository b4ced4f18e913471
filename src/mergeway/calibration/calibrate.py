"""The objective of a fold: what the trunk remembers of earlier tasks together with the data that comes with the arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergeway.calibration.memory import CalibrationMemory
from mergeway.calibration.samples import draw
from mergeway.calibration.task_data import task_data
from mergeway.checkpoint.heads import Head
from mergeway.errors import OptionError
from mergeway.fold.prepare import Base
from mergeway.model.compute import Compute


@dataclass(frozen=True)
class Ask:
    """What a caller gives with an arrival: data and heads, of the arrival or by task; or an objective; to be kept or not.

    `compute` says how the model is run.
    """

    data: str | Mapping[str, str] | None
    head: str | Path | Mapping[str, str | Path] | None
    objective: Any
    remember: bool
    compute: Compute | None = None


def calibrate(
    rule: str, base: Base, tasks: Mapping[str, float], heads: Mapping[str, Head], held: CalibrationMemory, asked: Ask
) -> tuple[CalibrationMemory | None, Any]:
    """What to remember from now on, and the loss of all tasks; `tasks` are names and weights, the arrival's last."""
    names, weights = list(tasks), list(tasks.values())
    if asked.objective is not None:
        if asked.data is not None:
            raise OptionError("--data and an objective: give one of them")
        return _kept(held, names, weights), asked.objective
    directory = base.checkpoint.directory
    if directory is None or (asked.data is None and len(held.tasks) < len(names)):
        raise OptionError(
            f"rule '{rule}' needs calibration data: give --data and --head with the arrival"
            + ("" if directory else f" (and a base that is a model directory, not {base.checkpoint.source})")
        )
    data, given = _by_task(asked.data, names[-1]), _by_task(asked.head, names[-1])
    for name in [*data, *given]:
        if name not in names:
            raise OptionError(f"--data {name}=…: the trunk holds no task '{name}'; it holds {', '.join(names)}")
    found = {t.task: t for t in held.tasks}
    settings = dict(held.settings)
    for name, where in data.items():
        own = heads[name].tensors if name in heads else None
        said, samples = task_data(where, Path(given[name]) if name in given else None, name, directory, own)
        if settings and dict(said) != settings:
            raise OptionError(
                f"the samples of '{name}' are for {said}, those in the trunk for {settings}; one trunk has one kind of model"
            )
        settings, found[name] = said, draw(samples, held.bounds.size, held.bounds.seed)
    if missing := [name for name in names if name not in found]:
        raise OptionError(
            f"the trunk remembers no samples of {', '.join(missing)}, which came with --no-memory or an objective of their own; give their data again with --data {missing[0]}=DATA, or an --objective over all tasks"
        )
    whole = _kept(replace(held, settings=settings, tasks=list(found.values())), names, weights)
    assert whole is not None
    return whole if asked.remember else _kept(held, names, weights), whole.objective(directory, weights, asked.compute)


def _kept(memory: CalibrationMemory, names: Sequence[str], weights: Sequence[float]) -> CalibrationMemory | None:
    """The remembered samples in the order of the tasks, each cut to its share of all tasks; None when there are none."""
    counts = dict(zip(names, memory.bounds.counts(len(names), weights), strict=True))
    found = {t.task: t for t in memory.tasks}
    tasks = [found[name].rows(slice(counts[name])) for name in names if name in found]
    return replace(memory, tasks=tasks) if tasks else None


def _by_task(given: Any, arrival: str) -> dict[str, Any]:
    if given is None:
        return {}
    return dict(given) if isinstance(given, Mapping) else {arrival: given}
