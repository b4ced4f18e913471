"""A two-checkpoint sweep: the trajectory from A to B, looked at in evenly spaced operating times (Table 6, ODE-M)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from mergeway.bench.suite import Suite
from mergeway.calibration.objective import Loss
from mergeway.calibration.samples import DEFAULT_SIZE
from mergeway.checkpoint import Checkpoint, open_checkpoint
from mergeway.core.pool import worker_pool
from mergeway.errors import OptionError
from mergeway.fold.prepare import prepare_arrival, prepare_base
from mergeway.rules import Ode, make


class SweepPoint(TypedDict):
    """The trajectory at one operating time."""

    time: float
    loss: float
    gamma: float
    alignment: float
    distance: float
    accuracies: dict[str, float]


def sweep(
    start: str,
    target: str,
    suite: Suite | None,
    loss: Loss | None,
    points: int,
    options: Mapping[str, object],
    samples: int = DEFAULT_SIZE,
) -> list[SweepPoint]:
    """One point for each operating time: loss, γ, alignment, distance to B, and the accuracies of the suite's two tasks.

    One path that stops at every time, so that the whole costs little more than one merge.
    """
    if points < 2:
        raise OptionError(f"--points is {points}; a sweep has at least the two ends")
    rule = make("ode", options)
    assert isinstance(rule, Ode)
    first = open_checkpoint(start)
    with worker_pool() as pool:
        base = prepare_base(first, pool)
        arrival = prepare_arrival(base, open_checkpoint(target, first), 1.0, target, pool)
    here = {n: first.read(n).float() for n, i in first.infos.items() if i.merges}
    there = {n: arrival.read(n).float() for n in here}
    names = _tasks_of(suite, first, arrival.checkpoint) if suite else []
    objective = suite.objective(names, size=samples) if suite else loss
    if objective is None:
        raise OptionError("a sweep needs an objective: give a suite or a loss")
    times = [i / (points - 1) for i in range(points)]
    whole = rule.path(here, there, objective, 1.0, times)
    found: list[SweepPoint] = []
    for time in times:
        params = whole.at(time)
        index = max(i for i, t in enumerate(whole.times) if t <= time + 1e-9)
        found.append(
            {
                "time": time,
                "loss": whole.losses[index],
                "gamma": whole.gammas[index],
                "alignment": whole.alignments[index],
                "distance": whole.distances[index],
                "accuracies": {n: suite.accuracy(params, n) for n in names} if suite else {},
            }
        )
    return found


def _tasks_of(suite: Suite, *checkpoints: Checkpoint) -> list[str]:
    names = []
    for checkpoint in checkpoints:
        found = [t.name for t in suite.tasks if t.is_of(checkpoint.source)]
        if not found:
            raise OptionError(f"{checkpoint.source}: is not an expert of suite '{suite.name}'")
        names.append(found[0])
    return names
