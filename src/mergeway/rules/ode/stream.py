"""A certificate over the whole stream: the loss each task had when it was folded in, its loss now, and a bound between the two.

Not in the paper, whose theorem is about the mean loss of one fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mergeway.calibration.objective import Objective
from mergeway.rules.ode.path import Trajectory
from mergeway.rules.rule import Params

HALVINGS = 6  # how often the operating time is halved before the arrival is left out
Losses = Mapping[str, float]


def folded(task: str) -> str:
    """The name of the fact that says what a task's loss was when it was folded in."""
    return f"folded {task}"


@dataclass(frozen=True)
class StreamBound:
    """Every task seen before this fold may lose at most `budget` against its loss when it was folded in."""

    facts: Losses
    budget: float

    def holds(self, losses: Losses) -> bool:
        """Whether no earlier task is above its bound."""
        return all(loss <= self.facts[folded(t)] + self.budget for t, loss in losses.items() if folded(t) in self.facts)

    def shortened(self, path: Callable[[float], Trajectory], until: float, objective: Objective) -> Trajectory:
        """The path to `until`, or to the longest of its halves that keeps the bound; if none does, the one that stays."""
        for halving in range(HALVINGS + 1):
            found = path(until / 2**halving)
            if self.holds(objective.task_losses(found.end)):
                return found
        return path(0.0)


def first_loss(objective: Objective, arrival: Params) -> dict[str, float]:
    """The fact of the first fold, which takes its arrival as it is."""
    return {folded(t): loss for t, loss in objective.task_losses(arrival).items()} if objective.tasks else {}


def audit(
    objective: Objective, start: Params, arrival: Params, path: Trajectory, bound: StreamBound
) -> tuple[dict[str, object], dict[str, float]]:
    """What a fold did to every task, against its losses before and when it was folded in; and the newest task's own fact."""
    before, after, goal = (objective.task_losses(p) for p in (start, path.end, arrival))
    rises = {t: loss - bound.facts[folded(t)] for t, loss in after.items() if folded(t) in bound.facts}
    newest = {folded(t): loss for t, loss in after.items() if folded(t) not in bound.facts}
    measured: dict[str, object] = {
        "before": before,
        "after": after,
        "barriers": {t: after[t] - (1 - path.until) * before[t] - path.until * goal[t] for t in after},
        "rises": rises,
        "worst": max(rises, key=lambda t: rises[t]) if rises else None,
        "budget": bound.budget,
        "certified": bound.holds(after),
    }
    return measured, newest
