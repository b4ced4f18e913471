"""A trajectory: the integrated path from the deployed model toward the arrival, with its certificate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from mergeway.errors import MergewayError, OptionError, suggest
from mergeway.rules.ode.controller import adaptive_steps, certified_steps, landed, next_step, within_envelope
from mergeway.rules.ode.field import Field, Slope
from mergeway.rules.ode.flat import FlatParams, Loss
from mergeway.rules.ode.metric import Metric
from mergeway.rules.ode.released import per_task_steps
from mergeway.rules.ode.solvers import STEPS, euler

Solver = Literal["euler", "heun", "rk4", "adaptive"]
Barrier = Literal["none", "path", "per-task"]


@dataclass
class Trajectory:
    """The path that was taken and what was measured on it.

    times, losses, gammas, alignments and distances belong together, one entry for each evaluated point; the last entry is
    the end, where γ and the alignment are not needed and therefore repeat the step before. `barrier` is B of Definition 3.2
    on the part that was travelled, `bound` that of Theorem 3.4, `rho` the largest alignment (Theorem 3.3), and `certified`
    says whether the envelope L(θ(t)) ≤ L(θ0) + t·max(ΔL, 0) held at every measured point.
    """

    until: float
    solver: str
    loss_start: float
    loss_target: float
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gammas: list[float] = field(default_factory=list)
    alignments: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    evaluations: int = 0
    probes: int = 0
    shortened: int = 0
    infeasible: int = 0
    end: dict[str, Tensor] = field(default_factory=dict, repr=False)
    save: tuple[float, ...] = ()
    saved: dict[float, dict[str, Tensor]] = field(default_factory=dict, repr=False)
    _again: Callable[[float], dict[str, Tensor]] | None = field(default=None, repr=False)

    @property
    def gap(self) -> float:
        """ΔL = L(θ1) − L(θ0)."""
        return self.loss_target - self.loss_start

    @property
    def barrier(self) -> float:
        """B = sup_t L(θ(t)) − [(1−t)L(θ0) + tL(θ1)] (Eq. 6); never below 0, its value at t = 0."""
        return max(
            (loss - self.loss_start - t * self.gap for t, loss in zip(self.times, self.losses, strict=True)),
            default=0.0,
        )

    @property
    def bound(self) -> float:
        """What Theorem 3.4 allows the barrier to be: max{L(θ0) − L(θ1), 0} (Eq. 17)."""
        return max(-self.gap, 0.0)

    @property
    def rho(self) -> float:
        """The largest ‖P_g u‖/‖u‖ that was seen."""
        return max(self.alignments, default=0.0)

    @property
    def distance_bound(self) -> float:
        """‖θ0 − θ1‖(1 − t)^(1−ρ), an upper bound of the distance to the target at the end (Eq. 31)."""
        return self.distances[0] * (1.0 - self.until) ** (1.0 - self.rho) if self.distances else 0.0

    @property
    def certified(self) -> bool:
        """Whether the envelope of Eq. 16 held at every measured point, up to the rounding of the loss."""
        return all(
            within_envelope(t, loss, self.loss_start, self.gap) for t, loss in zip(self.times, self.losses, strict=True)
        )

    def at(self, t: float) -> dict[str, Tensor]:
        """The parameters at a time up to `until`; a time that was not saved is integrated again."""
        if not 0.0 <= t <= self.until:
            raise OptionError(f"t = {t!r}: the trajectory was integrated from 0 until {self.until:g}")
        if t == self.until or self._again is None:
            return self.end
        return self.saved.get(t) or self._again(t)

    def summary(self) -> dict[str, Any]:
        """What a journal keeps: every number, no tensors."""
        plain = {k: v for k, v in self.__dict__.items() if k not in ("end", "save", "saved", "_again")}
        return plain | {
            "barrier": self.barrier,
            "bound": self.bound,
            "rho": self.rho,
            "distance_bound": self.distance_bound,
            "certified": self.certified,
        }

    def next_stop(self, t: float) -> float:
        """The next time at which the path has to be seen: one that is to be saved, or the end."""
        return min((s for s in self.save if s > t), default=self.until)

    def note(self, slope: Slope, flat: FlatParams) -> None:
        """Record an evaluated point, θ being at it."""
        if slope.time in self.save:
            self.saved[slope.time] = flat.tensors()
        self.times.append(slope.time)
        self.losses.append(slope.loss)
        self.gammas.append(slope.gamma)
        self.alignments.append(slope.alignment)
        self.distances.append(slope.distance)


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
) -> Trajectory:
    """Integrate the field from `start` toward `target` until time `until` (Algorithm 1, ODE-M).

    `loss` maps named tensors to a scalar. `barrier` is `path` for the paper's γ, `none` for no damping, `per-task` for the
    released code's barrier. `adaptive` chooses its steps so that the end is within `tolerance` of the way
    travelled; `certify` shortens a step of `euler` or `adaptive` until the loss envelope holds where it ends.
    The parameters at the times in `save` are kept.

    Deviates: the last step is shortened so that the path ends at `until`, where the paper's loop overshoots.
    """
    check_options(solver, step, certify, metric, barrier)
    if not 0.0 <= until <= 1.0:
        raise OptionError(f"until is {until!r}; a trajectory runs from 0 to at most 1")
    if not (math.isfinite(tolerance) and tolerance > 0.0):
        raise OptionError(f"tolerance is {tolerance!r}; it must be positive")
    stops = tuple(sorted(t for t in save if 0.0 <= t <= until))
    flat = FlatParams(start, target)
    loss_target = flat.value_at_target(loss)
    if not math.isfinite(loss_target):
        raise MergewayError(
            f"the objective is {loss_target} at the arrival; the calibration data or the arrival does not fit the model"
        )
    walk = Field(flat, loss, loss_target, guidance, metric, task_norm, rectify=barrier == "path")
    if not flat.moving or until == 0.0:
        value, distance = walk.measure(0.0)
        made = Trajectory(until, solver, value, loss_target, probes=2, end=flat.release())
        made.note(Slope(0.0, value, 1.0, 0.0, distance, 0.0, 0.0), flat)
        return made
    if barrier == "per-task":
        made = Trajectory(until, solver, walk.measure(0.0)[0], loss_target, probes=2, save=stops)
        per_task_steps(walk, made, step)
    else:
        first = walk.slope(0.0)
        made = Trajectory(until, solver, first.loss, loss_target, probes=1, save=stops)
        if solver == "adaptive":
            adaptive_steps(walk, made, first, tolerance, certify)
        elif certify:
            certified_steps(walk, made, first, step)
        else:
            _fixed_steps(walk, made, first, step)

    def again(t: float) -> dict[str, Tensor]:
        return trajectory(
            start,
            target,
            loss,
            t,
            solver,
            step,
            certify,
            tolerance=tolerance,
            guidance=guidance,
            metric=metric,
            task_norm=task_norm,
            barrier=barrier,
        ).end

    made._again = again
    return _finish(walk, made)


def _fixed_steps(walk: Field, made: Trajectory, slope: Slope, step: float) -> None:
    advance, t = STEPS[made.solver], 0.0
    while True:
        made.note(slope, walk.flat)
        h = next_step(t, step, made.next_stop(t))
        # A stage at t = 1 would divide by zero; there only Euler's step, which needs no stage, is defined.
        (euler if t + h >= 1.0 else advance)(walk, slope, h)
        t = landed(t, h, made)
        if t >= made.until:
            return
        slope = walk.slope(t)


def _finish(walk: Field, made: Trajectory) -> Trajectory:
    """Measure the loss at the end, unless the last step already did."""
    if made.times[-1] < made.until:
        made.probes += 1
        loss, distance = walk.measure(made.until)
        made.note(Slope(made.until, loss, made.gammas[-1], made.alignments[-1], distance, 0.0, 0.0), walk.flat)
    made.evaluations = walk.evaluations
    made.end = walk.flat.release()
    return made


def check_options(solver: str, step: float, certify: bool, metric: str, barrier: str) -> None:
    """Refuse options that do not exist or do not go together."""
    if solver not in get_args(Solver):
        raise OptionError(f"there is no solver '{solver}'; {suggest(solver, get_args(Solver))}")
    if metric not in get_args(Metric):
        raise OptionError(f"there is no metric '{metric}'; {suggest(metric, get_args(Metric))}")
    if barrier not in get_args(Barrier):
        raise OptionError(f"there is no barrier '{barrier}'; {suggest(barrier, get_args(Barrier))}")
    if not (math.isfinite(step) and 0.0 < step <= 1.0):
        raise OptionError(f"step is {step!r}; it must be positive and at most 1")
    if certify and solver in ("heun", "rk4"):
        raise OptionError(f"certify needs the solver 'euler' or 'adaptive', not '{solver}'")
    if barrier == "per-task" and (solver != "euler" or certify or metric != "euclidean"):
        raise OptionError("barrier=per-task goes with solver=euler, metric=euclidean and without certify")
