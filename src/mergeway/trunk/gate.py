"""The gate of `add`: the staged model is judged beside the deployed one before it takes its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mergeway.calibration.calibrate import CalibrationRequest
from mergeway.calibration.given import Data, heads_by_task
from mergeway.calibration.memory import CALIBRATION, CalibrationMemory
from mergeway.calibration.trial import Heads, Trial, kept_trials, read_trials, tensors_of
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.heads import Head
from mergeway.core.progress import Progress
from mergeway.core.ranks import team
from mergeway.errors import GateRefused, OptionError, suggest
from mergeway.fold.prepare import Arrival, Base
from mergeway.model.kinds import CausalLM
from mergeway.trunk.commit import Change


@dataclass(frozen=True)
class Gate:
    """What a fold must not cost. `check` is the test data of tasks, `max_drop` in points of percent, `least` in percent by task."""

    check: Mapping[str, Data] = field(default_factory=dict[str, Data])
    max_drop: float | None = None
    least: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.max_drop is not None and not (math.isfinite(self.max_drop) and self.max_drop >= 0):
            raise OptionError(f"--max-drop is {self.max_drop}; it is a number of points, 0 or more")
        for task, value in self.least.items():
            if not 0 <= value <= 100:
                raise OptionError(f"--min {task}={value}: it is a percentage, 0 to 100")

    def trials(
        self,
        change: Change,
        arrival: Arrival,
        heads: Mapping[str, Head],
        held: CalibrationMemory | None,
        request: CalibrationRequest,
    ) -> list[Trial]:
        """What is judged: the data given, and the samples that the trunk holds out for the tasks without any."""
        directory = change.base.checkpoint.directory
        kept = kept_trials(held, directory, request.compute) if held is not None and directory is not None else []
        memory = CalibrationMemory.read(change.store.of(change.point.last).directory(CALIBRATION))
        known = Heads(heads_by_task(request.head, arrival.task), heads, memory)
        given = read_trials(self.check, directory, known, request.compute) if self.check else []
        found = [*given, *(t for t in kept if t.task not in self.check)]
        if found and team().count > 1:
            raise OptionError("a model is judged on one process; leave out --check and --holdout under torchrun")
        tasks = [*(f.task for f in change.point.held), arrival.task] if given else []
        for trial in given:
            if trial.task not in tasks and not isinstance(trial.model, CausalLM):
                raise OptionError(f"--check {trial.task}=…: the trunk holds no such task; {suggest(trial.task, tasks)}")
        names = [trial.task for trial in found]
        for task in self.least:
            if task not in names:
                raise OptionError(
                    f"--min {task}=…: nothing judges that task; give its data with --check {task}=DATA, or keep some of it with --holdout"
                )
        if self.max_drop is not None and not found:
            raise OptionError(
                "--max-drop: nothing is judged; give data with --check TASK=DATA, or keep some with --holdout"
            )
        return found

    def judge(
        self,
        trials: Sequence[Trial],
        change: Change,
        staged: Callable[[], Checkpoint],
        arrival: Arrival,
        progress: Progress,
    ) -> dict[str, object]:
        """What the journal keeps of the scores, if there are any; a fold that would cost too much is refused."""
        if not trials:
            return {}
        rows = judge_fold(trials, change.base, change.deployed(), staged(), arrival, progress)
        self.refuse(rows, arrival.task)
        return {"checks": [row.as_json() for row in rows]}

    def refuse(self, rows: Sequence[Judged], arrival: str) -> None:
        """Refuse a fold that would cost too much."""
        faults: list[str] = []
        for row in rows:
            drop = row.before - row.after
            if self.max_drop is not None and row.task != arrival and drop > self.max_drop:
                faults.append(f"'{row.task}' would fall by {drop:.2f} points, and {self.max_drop:g} are allowed")
            if row.task in self.least and row.after < self.least[row.task]:
                faults.append(
                    f"'{row.task}' would be at {row.after:.2f} %, and at least {self.least[row.task]:g} are asked"
                )
        if faults:
            raise GateRefused(f"refused: {'; '.join(faults)}; nothing was deployed", [row.as_json() for row in rows])


@dataclass(frozen=True)
class Judged:
    """A task before and after a fold, by its `measure`, in percent; of the arrival's own task also what the arrival is worth."""

    task: str
    measure: str
    samples: int
    before: float
    after: float
    loss: float
    arrival: float | None = None

    def as_json(self) -> dict[str, object]:
        """The row as the journal keeps it."""
        return {k: v for k, v in self.__dict__.items() if v is not None}


def judge_fold(
    trials: Sequence[Trial], base: Base, deployed: Checkpoint, staged: Checkpoint, arrival: Arrival, progress: Progress
) -> list[Judged]:
    """Every trial on the deployed model, on the staged one and, of its own task, on the arrival."""
    progress.begin("judging", 2 * len(trials), "scores")
    own = (
        {name: arrival.read(name) for name in base.merged_infos} if any(t.task == arrival.task for t in trials) else {}
    )
    rows: list[Judged] = []
    before, after = tensors_of(deployed), tensors_of(staged)
    for trial in trials:
        then = trial.score(before)
        progress.advance(1)
        now = trial.score(after)
        progress.advance(1)
        expert = trial.score({**after, **own}).value if trial.task == arrival.task else None
        rows.append(Judged(trial.task, now.measure, now.samples, then.value, now.value, now.loss, expert))
    return rows
