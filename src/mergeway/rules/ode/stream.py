"""A certificate over the whole stream: how far the loss of each task has risen since it was folded in, and a bound on that.

Not in the paper, whose theorem is about the mean loss of one fold.

A memory of constant size holds fewer samples of a task after every fold, so its losses at two folds are of different samples. The rise
is therefore a sum over the folds, each of which measures before and after on the samples that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mergeway.calibration.objective import Objective
from mergeway.rules.ode.path import Trajectory
from mergeway.rules.rule import Params

HALVINGS = 6  # how often the operating time is halved before the arrival is left out
Losses = Mapping[str, float]


def risen(task: str) -> str:
    """The name of the fact that says how far a task's loss has risen since it was folded in."""
    return f"risen {task}"


@dataclass(frozen=True)
class StreamBound:
    """Every task seen before this fold may lose at most `budget` against its loss when it was folded in."""

    facts: Losses
    budget: float

    def rises(self, before: Losses, after: Losses) -> dict[str, float]:
        """How far each earlier task will have risen when this fold takes its losses from `before` to `after`."""
        return {t: self.facts[risen(t)] + after[t] - before[t] for t in after if risen(t) in self.facts}

    def holds(self, rises: Losses) -> bool:
        """Whether no earlier task is above its bound."""
        return all(rise <= self.budget for rise in rises.values())

    def shortened(
        self, path: Callable[[float], Trajectory], start: Params, until: float, objective: Objective
    ) -> Trajectory:
        """The path to `until`, or to the longest of its halves that keeps the bound; if none does, the one that stays."""
        before = objective.task_losses(start)
        for halving in range(HALVINGS + 1):
            found = path(until / 2**halving)
            if self.holds(self.rises(before, objective.task_losses(found.end))):
                return found
        return path(0.0)


def nothing_risen(objective: Objective) -> dict[str, float]:
    """The facts of the first fold, which takes its arrival as it is."""
    return {risen(task.task): 0.0 for task in objective.tasks}


def audit(
    objective: Objective, start: Params, arrival: Params, path: Trajectory, bound: StreamBound
) -> tuple[dict[str, object], dict[str, float]]:
    """What a fold did to every task, and how far each has risen since it was folded in; the latter as facts too."""
    before, after, goal = (objective.task_losses(p) for p in (start, path.end, arrival))
    rises = bound.rises(before, after)
    measured: dict[str, object] = {
        "before": before,
        "after": after,
        "barriers": {t: after[t] - (1 - path.until) * before[t] - path.until * goal[t] for t in after},
        "rises": rises,
        "worst": max(rises, key=lambda t: rises[t]) if rises else None,
        "budget": bound.budget,
        "certified": bound.holds(rises),
    }
    return measured, {risen(t): rises.get(t, 0.0) for t in after}
