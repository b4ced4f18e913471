"""An objective over several ranks: each takes its share of the calibration samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from mergeway.calibration.batches import Batch, Pass, batch_passes
from mergeway.calibration.loss import Predict, targets
from mergeway.calibration.objective import Objective
from mergeway.calibration.sample_objective import SampleObjective
from mergeway.calibration.samples import MINIBATCH, Samples
from mergeway.core.ranks import Team
from mergeway.errors import OptionError
from mergeway.model.inputs import Params
from mergeway.model.model import Network


class SharedObjective:
    """The samples of an objective, which every rank has, and this rank's part of them."""

    def __init__(self, objective: Objective, team: Team) -> None:
        if not isinstance(objective, SampleObjective) or not isinstance(objective.predict, Network):
            raise OptionError(
                "an objective of your own cannot be shared between ranks; give the tasks' data, or run without torchrun"
            )
        self._objective, self._team = objective, team
        self._run = objective.predict.run  # looks at the model before its parameters are cut
        self.tasks, self.shares = objective.tasks, objective.shares

    @property
    def precision(self) -> AbstractContextManager[object]:
        """That of the objective itself."""
        return self._objective.precision

    def batches(self, count: int, size: int = MINIBATCH, seed: int = 0) -> Iterator[Batch]:
        """The same minibatches on every rank."""
        return self._objective.batches(count, size, seed)

    def taught(self, weights: Sequence[float], arrival: Callable[[], Params], always: bool) -> Objective:
        """The objective itself with the arrival's answers: every rank asks for itself, and hears the same."""
        return self._objective.taught(weights, arrival, always)

    def task_data(self, k: int) -> tuple[Predict, Samples]:
        """The model and the samples of one task."""
        return self._objective.task_data(k)

    def newest(self) -> tuple[Predict, Samples]:
        """The model and the samples of the task that came last."""
        return self._objective.newest()

    def _own_passes(self, batch: Batch) -> list[Pass]:
        """Those over this rank's share of a minibatch's rows."""
        mine = [task.rows(slice(self._team.rank, None, self._team.count)) for task in batch]
        parts = [targets(own) / max(1, targets(task)) for own, task in zip(mine, batch, strict=True)]
        kept = [(own, share * part) for own, share, part in zip(mine, self.shares, parts, strict=True) if part]
        return self._passes([own for own, _ in kept], [weight for _, weight in kept]) if kept else []

    def _passes(self, batch: Batch, weights: Sequence[float]) -> list[Pass]:
        ours = self._objective
        return batch_passes(ours.predict, batch, weights, ours.batch, ours.temperature)

    def _own_batches(self, task: Samples) -> Iterator[tuple[Samples, float]]:
        """Micro-batches of this rank's samples; all ranks have as many, for each takes part in every gathering."""
        mine, total = task.rows(slice(self._team.rank, None, self._team.count)), targets(task)
        for start in range(0, -(-len(task) // self._team.count), self._objective.batch):
            rows = mine.rows(slice(start, start + self._objective.batch))
            count = targets(rows) if len(rows) else 0
            yield (rows, count / total) if count else (task.rows(slice(1)), 0.0)
