"""The objective of a fold: what the trunk remembers of earlier tasks together with the data that comes with the arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mergeway.calibration.given import ByTask, Data, HeadByTask, Prepared, by_task, heads_by_task, is_by_task
from mergeway.calibration.memory import CalibrationMemory
from mergeway.calibration.objective import Objective, as_objective
from mergeway.calibration.samples import DEFAULT_SIZE, Samples, draw, hold_out, require_labels
from mergeway.calibration.table import load_pyarrow
from mergeway.calibration.task_data import task_data
from mergeway.calibration.written import DEFAULT, Writing
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.heads import Head
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.inputs import Params
from mergeway.model.kinds import CausalLM, kind_of, make_model
from mergeway.model.model import Model


@dataclass(frozen=True)
class CalibrationRequest:
    """What a caller gives with an arrival: data and heads, of the arrival or by task; or an objective; to be kept or not.

    `compute` says how the model is run.
    """

    data: ByTask
    head: HeadByTask
    objective: Objective | Callable[[Params], Tensor] | None
    remember: bool
    compute: Compute | None = None
    # How many copies of each sample the arrival is asked about; by default as many as the memory says.
    copies: int | None = None
    # Who writes samples of its own, and whether it does so where no data is given; only a language model can.
    arrival: Callable[[], Params] | None = None
    writes: bool = False


def calibrate(
    rule: str,
    base: Checkpoint,
    tasks: Mapping[str, float],
    heads: Mapping[str, Head],
    held: CalibrationMemory,
    request: CalibrationRequest,
) -> tuple[CalibrationMemory | None, Objective]:
    """What to remember from now on, and the loss of all tasks; `tasks` are names and weights, the arrival's last.

    `heads` are those that came with the arrivals' weights.
    """
    names, weights = list(tasks), list(tasks.values())
    if request.objective is not None:
        if request.data is not None:
            raise OptionError("--data and an objective: give one of them")
        return held.shared_out(names, weights), as_objective(request.objective)
    directory = base.directory
    if request.data is None and request.writes and directory and kind_of(directory)["kind"] == CausalLM.kind:
        request = replace(request, data=DEFAULT)
    if request.remember and request.data is not None:
        load_pyarrow()
    if directory is None or (request.data is None and len(held.tasks) < len(names)):
        raise OptionError(
            f"rule '{rule}' needs calibration data: give --data and --head with the arrival"
            + ("" if directory else f" (and a base that is a model directory, not {base.source})")
        )
    grown, model = _with_data(held, directory, names, heads, request)
    remembered = {t.task for t in grown.tasks}
    if missing := [name for name in names if name not in remembered]:
        raise OptionError(
            f"the trunk remembers no samples of {', '.join(missing)}, which came with --no-memory or an objective of their own; give their data again with --data {missing[0]}=DATA, or an --objective over all tasks"
        )
    whole = grown.shared_out(names, weights)
    assert whole is not None
    for task in whole.tasks:
        if task.task != names[-1] and not task.labelled and task.answers is None:
            raise OptionError(
                f"the samples of '{task.task}' have no labels, and the trunk kept none of its answers; give labelled data of it with --data {task.task}=DATA, and keep the samples of tasks without labels (no --no-memory)"
            )
    kept = whole if request.remember else held.shared_out(names, weights)
    return kept, whole.objective(model, weights, request.copies)


def read_task(
    data: Data,
    head: str | Path | None,
    task: str,
    base: Checkpoint,
    own: Head | None = None,
    compute: Compute | None = None,
    arrival: Callable[[], Params] | None = None,
) -> tuple[Model, Samples]:
    """The model of a base and the samples of one task, under the head that came with its arrival, or written by the arrival."""
    if base.directory is None:
        raise OptionError(f"data can be used with a base that is a model directory, not {base.source}")
    tensors = own.tensors if own else None
    file, writing = Path(head) if head else None, Writing(arrival) if arrival else None
    model, samples = task_data(data, file, task, base.directory, tensors, compute, writing=writing)
    return model, draw(samples, DEFAULT_SIZE)


@dataclass(frozen=True)
class Parted:
    """An arrival's data in two: what is held out to judge by, and all data as it was given, without that."""

    settings: Mapping[str, object]
    held: Samples
    data: ByTask


def part_data(
    task: str, base: Checkpoint, own: Head | None, request: CalibrationRequest, share: float, seed: int
) -> Parted:
    """Hold out a share of the arrival's samples."""
    if not 0 < share < 1:
        raise OptionError(f"--holdout is {share}; it is a share of the samples, more than 0 and less than 1")
    data = by_task(request.data, task)
    if task not in data or base.directory is None:
        raise OptionError(
            f"--holdout keeps back some of the data of '{task}'; give it with --data (and a base that is a model directory)"
        )
    load_pyarrow()
    head, tensors = heads_by_task(request.head, task).get(task), own.tensors if own else None
    model, samples = task_data(data[task], head, task, base.directory, tensors, request.compute)
    require_labels(samples, "a model is judged by those of samples that are held out")
    fit, held = hold_out(draw(samples, len(samples), seed), share)
    data[task] = Prepared(model.settings, fit)
    return Parted(model.settings, held, data if is_by_task(request.data) else data[task])


def _with_data(
    held: CalibrationMemory,
    directory: Path,
    names: Sequence[str],
    heads: Mapping[str, Head],
    request: CalibrationRequest,
) -> tuple[CalibrationMemory, Model]:
    """The memory with the samples that were given, and the model that read them: the one to be run."""
    data, given = by_task(request.data, names[-1]), heads_by_task(request.head, names[-1])
    for name in [*data, *given]:
        if name not in names:
            raise OptionError(f"--data {name}=…: the trunk holds no task '{name}'; it holds {', '.join(names)}")
    model: Model | None = None
    for name, where in data.items():
        own = heads[name].tensors if name in heads else None
        writing = Writing(request.arrival, held.bounds.seed) if request.arrival and name == names[-1] else None
        file = given.get(name)
        model, samples = task_data(where, file, name, model or directory, own, request.compute, writing=writing)
        held = held.holding(model.settings, samples)
    return held, model or make_model(directory, held.settings, request.compute)
