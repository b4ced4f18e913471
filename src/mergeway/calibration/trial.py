"""Trials: the data of tasks made ready to judge models on, each under the head that the task has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from mergeway.calibration.given import Data
from mergeway.calibration.judge import Score, judge
from mergeway.calibration.memory import CalibrationMemory
from mergeway.calibration.questions import Asked, asked_of, read_asked
from mergeway.calibration.samples import Samples
from mergeway.calibration.task_data import task_data
from mergeway.checkpoint import Checkpoint
from mergeway.checkpoint.heads import Head
from mergeway.checkpoint.source import JsonObject
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.inputs import Params
from mergeway.model.kinds import CausalLM, make_model
from mergeway.model.model import Model


@dataclass(frozen=True)
class Trial:
    """A task's samples and questions, and the model that reads them."""

    task: str
    model: Model
    samples: Samples
    asked: Asked = field(default_factory=Asked)

    def score(self, params: Params) -> Score:
        """What the model is worth with these parameters."""
        return judge(self.model, params, self.samples, self.asked)


@dataclass(frozen=True)
class Heads:
    """The heads that tasks are judged with: `files` before those of arrivals, before frozen ones that samples came with."""

    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    arrivals: Mapping[str, Head] = field(default_factory=dict[str, Head])
    memory: CalibrationMemory | None = None

    @property
    def settings(self) -> JsonObject | None:
        """How the model reads its inputs, where samples have been read before."""
        return dict(self.memory.settings) if self.memory else None

    def frozen(self, task: str) -> Tensor | None:
        """Class vectors that are kept with the task's samples."""
        found = [t.head for t in self.memory.tasks if t.task == task] if self.memory else []
        return found[0] if found and isinstance(found[0], Tensor) else None


def read_trials(
    data: Mapping[str, Data], base: Path | None, heads: Heads, compute: Compute | None = None
) -> list[Trial]:
    """The test data of several tasks, read for the model in a directory; all are run by one model where their settings allow it."""
    if base is None:
        raise OptionError("a model can be judged on data if it is a model directory; give one, or --base DIR")
    model: Model | Path = base
    trials: list[Trial] = []
    for task, where in data.items():
        own = heads.arrivals[task].tensors if task in heads.arrivals else None
        file, frozen = heads.files.get(task), heads.frozen(task)
        model, samples = task_data(
            where, file, task, model, own, compute, "test", settings=heads.settings, frozen=frozen
        )
        asked = read_asked(where, model) if isinstance(model, CausalLM) else Asked()
        trials.append(Trial(task, model, samples, asked))
    return trials


def kept_trials(held: CalibrationMemory, base: Path, compute: Compute | None = None) -> list[Trial]:
    """Samples that a trunk keeps back, as trials; a prompt with its answer among them is a question again."""
    model = make_model(base, held.settings, compute)
    return [Trial(t.task, model, t, asked_of(t, model) if isinstance(model, CausalLM) else Asked()) for t in held.tasks]


def scores(trials: Sequence[Trial], params: Params) -> dict[str, Score]:
    """What one model is worth on every task."""
    return {trial.task: trial.score(params) for trial in trials}


def tensors_of(model: Checkpoint) -> dict[str, Tensor]:
    """All parameters of a model in memory."""
    return {name: model.read(name) for name, info in model.infos.items() if info.merges}
