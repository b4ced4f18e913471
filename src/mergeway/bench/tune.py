"""Fair baselines: the one number of a rule, chosen by the samples that rules with data get, without labels or test data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mergeway.bench.protocol import orders
from mergeway.bench.suite import Suite
from mergeway.calibration.objective import Objective
from mergeway.checkpoint import open_checkpoint
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.fold.merge import merge
from mergeway.rules import make

# The number of each rule that decides most, and where it is looked for; every grid holds the rule's default.
GRIDS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "task-arithmetic": ("scaling", (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)),
    "ties": ("scaling", (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)),
    "opcm": ("alpha", (0.1, 0.3, 0.5, 0.7, 0.9)),
    "magmax": ("scaling", (0.1, 0.2, 0.3, 0.5, 0.7, 1.0)),
    "iso": ("scaling", (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)),
    "dop": ("alpha", (0.5, 0.7, 0.8, 0.9)),
}


@dataclass(frozen=True)
class Tuned:
    """A rule with the number that was chosen, and the loss of every number tried."""

    rule: str
    option: str
    value: float
    losses: Mapping[float, float]

    @property
    def text(self) -> str:
        """The rule as `bench` takes it."""
        return f"{self.rule}:{self.option}={self.value:g}"


def tune(
    suite: Suite,
    rules: Sequence[str],
    samples: int,
    number: int,
    length: int | None = None,
    progress: Progress = SILENT,
) -> list[Tuned]:
    """The best number of each rule that has one to choose: the lowest mean KL(expert ‖ merged) at the end of one stream.

    The stream is that of order `number`, which should not be among those reported. No rule here fits on samples, so all of
    them are held out; the experts answer for them, so nobody needs labels.
    """
    chosen = [rule for rule in rules if rule in GRIDS]
    if not chosen:
        raise OptionError(f"--tune: none of the rules has a number to choose; those that have are {', '.join(GRIDS)}")
    tasks = [task.name for task in suite.tasks][:length]
    order = orders(tasks, number + 1)[number]
    loss = _answered(suite, order, samples, number)
    progress.begin("tuning", sum(len(GRIDS[rule][1]) for rule in chosen), "streams")
    return [_tuned(suite, rule, order, loss, progress) for rule in chosen]


def tune_rules(
    suite: Suite, rules: Sequence[str], samples: int, number: int, lengths: Sequence[int] | None, progress: Progress
) -> list[str]:
    """The same for a command: each rule as `bench` takes it, and a line on standard error about each choice."""
    found = tune(suite, rules, samples, number, max(lengths) if lengths else None, progress)
    for one in found:
        tried = ", ".join(f"{value:g}: {loss:.3f}" for value, loss in one.losses.items())
        print(f"tuned {one.text} (KL to the experts: {tried})", file=sys.stderr)
    return [one.text for one in found]


def _tuned(suite: Suite, rule: str, order: Sequence[str], loss: Objective, progress: Progress) -> Tuned:
    option, values = GRIDS[rule]
    arrivals = [suite.task(name).expert for name in order]
    losses: dict[float, float] = {}
    for value in values:
        merged = merge(suite.base, arrivals, make(rule, {option: value}), compute=suite.compute)
        losses[value] = float(loss(merged))
        progress.advance(1)
    return Tuned(rule, option, min(losses, key=lambda value: losses[value]), losses)


def _answered(suite: Suite, order: Sequence[str], samples: int, number: int) -> Objective:
    """The loss of all tasks on their calibration samples, by the answers of each task's own expert."""
    base = open_checkpoint(suite.base)
    names = [name for name, info in base.infos.items() if info.merges]
    objective: Objective = suite.objective(list(order), size=samples, seed=number, copies=0)
    for weights, task in _growing(order):
        expert = open_checkpoint(suite.task(task).expert, base)
        objective = objective.taught(weights, lambda expert=expert: {n: expert.read(n) for n in names}, True)
    return objective.seen(len(order))


def _growing(order: Sequence[str]) -> Iterator[tuple[list[float], str]]:
    """Every arrival of a stream with the weights of all up to it."""
    for k, task in enumerate(order, 1):
        yield [1.0] * k, task
