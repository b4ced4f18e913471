"""The objective of a fold: what the trunk remembers of earlier tasks together with the data that comes with the arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mergeway.calibration.memory import CalibrationMemory
from mergeway.calibration.objective import Objective, as_objective
from mergeway.calibration.samples import DEFAULT_SIZE, Samples, draw
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

# Of the arrival alone, or by task.
ByTask = str | Path | Mapping[str, str] | Mapping[str, Path] | Mapping[str, str | Path] | None


@dataclass(frozen=True)
class CalibrationRequest:
    """What a caller gives with an arrival: data and heads, of the arrival or by task; or an objective; to be kept or not.

    `compute` says how the model is run.
    """

    data: ByTask
    head: ByTask
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
    data: str | Path,
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
    model, samples = task_data(str(data), file, task, base.directory, tensors, compute, writing=writing)
    return model, draw(samples, DEFAULT_SIZE)


def _with_data(
    held: CalibrationMemory,
    directory: Path,
    names: Sequence[str],
    heads: Mapping[str, Head],
    request: CalibrationRequest,
) -> tuple[CalibrationMemory, Model]:
    """The memory with the samples that were given, and the model that read them: the one to be run."""
    data, given = _by_task(request.data, names[-1]), _by_task(request.head, names[-1])
    for name in [*data, *given]:
        if name not in names:
            raise OptionError(f"--data {name}=…: the trunk holds no task '{name}'; it holds {', '.join(names)}")
    model: Model | None = None
    for name, where in data.items():
        own = heads[name].tensors if name in heads else None
        head = Path(given[name]) if name in given else None
        writing = Writing(request.arrival, held.bounds.seed) if request.arrival and name == names[-1] else None
        model, samples = task_data(str(where), head, name, model or directory, own, request.compute, writing=writing)
        held = held.holding(model.settings, samples)
    return held, model or make_model(directory, held.settings, request.compute)


def _by_task(given: ByTask, arrival: str) -> dict[str, str | Path]:
    if given is None:
        return {}
    return {arrival: given} if isinstance(given, str | Path) else dict(given)
