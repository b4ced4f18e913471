"""`trajectory`: the integrated path from the deployed model toward the arrival, with its certificate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from mergeway.calibration.objective import Loss, Objective, as_objective
from mergeway.core.ranks import ALONE, Team
from mergeway.errors import MergewayError, OptionError
from mergeway.rules.ode.flat import FlatParams
from mergeway.rules.ode.integrate import integrate, stay
from mergeway.rules.ode.metric import Metric
from mergeway.rules.ode.path import Trajectory
from mergeway.rules.ode.plan import Barrier, Plan, Solver
from mergeway.rules.ode.stops import Stops


def trajectory(
    start: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    loss: Loss,
    until: float = 0.5,
    solver: Solver = "euler",
    step: float = 0.05,
    certify: bool = False,
    *,
    tolerance: float = 0.01,
    guidance: float = 0.0,
    metric: Metric = "euclidean",
    task_norm: float = 0.0,
    barrier: Barrier = "path",
    save: Sequence[float] = (),
    team: Team = ALONE,
) -> Trajectory:
    """Integrate the field from `start` toward `target` until time `until` (Algorithm 1, ODE-M).

    `loss` maps named tensors to a scalar. `barrier` is `path` for the paper's γ, `none` for no damping, `per-task` for a
    ceiling on every task, `released` for the released code's own form of that. `adaptive` chooses its steps so that the end is off by at most `tolerance` of the distance
    travelled; `certify` shortens a step of `euler` or `adaptive` until the loss envelope holds where it ends.
    The parameters at the times in `save` are kept. Each rank of `team` holds its own rows of the tensors.

    Deviates: the last step is shortened so that the path ends at `until`, where the paper's loop overshoots.
    """
    plan = Plan(solver, step, certify, tolerance, guidance, metric, task_norm, barrier)
    return follow(start, target, as_objective(loss), until, plan, save, team)


def follow(
    start: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    objective: Objective,
    until: float,
    plan: Plan,
    save: Sequence[float] = (),
    team: Team = ALONE,
) -> Trajectory:
    """The trajectory of a plan."""
    if not 0.0 <= until <= 1.0:
        raise OptionError(f"until is {until!r}; a trajectory runs from 0 to at most 1")
    until = plan.end(until)
    stops = Stops(until, tuple(sorted(t for t in save if 0.0 <= t <= until)))
    flat = FlatParams(start, target, team)
    loss_target = flat.at_target(lambda: flat.value(objective))
    if not math.isfinite(loss_target):
        raise MergewayError(
            f"the objective is {loss_target} at the arrival; the calibration data or the arrival does not fit the model"
        )
    field = plan.field(flat, objective, loss_target)
    if not flat.moving or until == 0.0:
        return stay(field, stops, plan.solver)
    path = integrate(*plan.arrange(field, stops), stops, plan.solver)
    path.again = lambda t: follow(start, target, objective, t, plan, team=team).end
    return path
