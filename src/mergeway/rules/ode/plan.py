"""The options of a trajectory, and the field, the solver and the controller that they name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from mergeway.calibration.objective import Objective
from mergeway.errors import OptionError, suggest
from mergeway.rules.ode import released
from mergeway.rules.ode.barrier import Ceilings, GuardedField
from mergeway.rules.ode.controllers import SCALES, Adaptive, Backtracking, Certified, Controller, Fixed
from mergeway.rules.ode.field import Field
from mergeway.rules.ode.flat import FlatParams
from mergeway.rules.ode.metric import Metric
from mergeway.rules.ode.solvers import EULER, HEUN, SOLVERS, Tableau
from mergeway.rules.ode.stops import Stops

Solver = Literal["euler", "heun", "rk4", "adaptive"]
# `constraints` and `backtracking` are the halves of `per-task`.
Barrier = Literal["none", "path", "per-task", "constraints", "backtracking", "released"]
GUARDED = ("per-task", "constraints", "backtracking", "released")

TOLERANCE = 0.01  # what `adaptive` may be off by, of the distance travelled
SAME_POINT = 1e-9  # of a step: a time this close below a point of the grid is on it


@dataclass(frozen=True)
class Plan:
    """How to integrate: what is checked when it is created goes together."""

    solver: Solver = "euler"
    step: float = 0.05
    certify: bool = False
    tolerance: float = TOLERANCE
    guidance: float = 0.0
    metric: Metric = "euclidean"
    task_norm: float = 0.0
    barrier: Barrier = "path"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("solver", self.solver, get_args(Solver)),
            ("metric", self.metric, get_args(Metric)),
            ("barrier", self.barrier, get_args(Barrier)),
        ):
            if value not in known:
                raise OptionError(f"there is no {what} '{value}'; {suggest(value, known)}")
        if not (math.isfinite(self.step) and 0.0 < self.step <= 1.0):
            raise OptionError(f"step is {self.step!r}; it must be positive and at most 1")
        if not (math.isfinite(self.tolerance) and self.tolerance > 0.0):
            raise OptionError(f"tolerance is {self.tolerance!r}; it must be positive")
        if self.certify and self.solver in ("heun", "rk4"):
            raise OptionError(f"certify needs the solver 'euler' or 'adaptive', not '{self.solver}'")
        if self.barrier in GUARDED and (self.solver != "euler" or self.certify or self.metric != "euclidean"):
            raise OptionError(f"barrier={self.barrier} goes with solver=euler, metric=euclidean and without certify")

    def end(self, until: float) -> float:
        """Where a path ends: at `until`, but the released code stops at the last point of its grid before it."""
        return math.floor(until / self.step + SAME_POINT) * self.step if self.barrier == "released" else until

    def field(self, flat: FlatParams, loss: Objective, loss_target: float) -> Field:
        """The velocity field, L(θ1) having been measured."""
        return Field(
            flat, loss, loss_target, self.guidance, self.metric, self.task_norm, self.barrier == "path", probes=1
        )

    def arrange(self, field: Field, stops: Stops) -> tuple[Field, Tableau, Controller]:
        """The field as the barrier has it, the solver, and the controller."""
        if self.barrier in GUARDED:
            return self._guarded(field, stops)
        if self.solver == "adaptive":
            return field, EULER if self.certify else HEUN, Adaptive(self.tolerance, self.certify)
        return field, SOLVERS[self.solver], (Certified if self.certify else Fixed)(self.step)

    def _guarded(self, field: Field, stops: Stops) -> tuple[Field, Tableau, Controller]:
        start = field.measure(0.0)
        if not field.loss.tasks:
            raise OptionError(
                f"barrier={self.barrier} needs per-task losses; the objective must be a mergeway Objective"
            )
        literal = self.barrier == "released"
        flat, task_losses = field.flat, field.task_losses
        if literal:
            task_losses = partial(released.batch_losses, field.loss, flat.params)
        ceilings = Ceilings(task_losses(), flat.at_target(task_losses))
        guarded = (released.ReleasedField if literal else GuardedField)(
            flat,
            field.loss,
            field.loss_target,
            field.guidance,
            task_norm=field.task_norm,
            probes=field.probes,
            start=start,
            ceilings=ceilings,
            stops=stops,
            step=self.step,
        )
        if isinstance(guarded, GuardedField):
            guarded.constrains = self.barrier != "backtracking"
        scales = {"released": released.SCALES, "constraints": 0}.get(self.barrier, SCALES)
        return guarded, EULER, Backtracking(self.step, ceilings, scales)
