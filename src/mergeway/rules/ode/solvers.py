"""The solvers as data: explicit Runge-Kutta tableaus in low-storage form, one register q beside θ.

Every stage evaluates k = h·v(t + c·h) and sets θ ← θ + a·k + b·q, then q ← keep·q + mix·k. The first stage has no q yet and
the last one needs none afterwards, so that the last, and with it all of Euler, is a lerp toward θ1 and an axpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from mergeway.rules.ode.field import Field, Slope
from mergeway.rules.ode.flat import FlatParams


@dataclass(frozen=True)
class Stage:
    """One row of a tableau; in the last, a is divided by `over`, where a factor 1/over would round."""

    c: float
    a: float
    b: float = 0.0
    keep: float = 0.0
    mix: float = 1.0
    over: int = 1


@dataclass
class Leg:
    """A first stage θ + h·v that can be taken back, shortened or stretched, v being kept in the spare vector."""

    flat: FlatParams
    v: Tensor
    h: float

    def resize(self, h: float) -> None:
        """Move θ to h·v from where the leg began."""
        self.flat.theta.add_(self.v, alpha=h - self.h)
        self.h = h


@dataclass(frozen=True)
class Tableau:
    """A solver: its order, its stages, and whether the register holds the increment h·v (Gill) or v itself."""

    order: int
    stages: tuple[Stage, ...]
    increments: bool = False

    def advance(self, field: Field, here: Slope, h: float) -> None:
        """θ(t) to θ(t + h), given the slope at t."""
        *inner, last = self.stages
        flat = field.flat
        scale, unit = (h, 1.0) if self.increments else (1.0, h)  # of what q holds, and of what it counts
        q: Tensor | None = None
        there = here
        for stage in inner:
            if q is None:
                q = flat.velocity_into(flat.spare, here.to_target, here.to_gradient)
                if self.increments:
                    q.mul_(h)
                flat.theta.add_(q, alpha=stage.a * unit)
            else:
                there = field.slope(here.time + stage.c * h)
                k = flat.velocity_into(flat.grad, scale * there.to_target, scale * there.to_gradient)
                flat.theta.add_(k, alpha=stage.a * unit).add_(q, alpha=stage.b * unit)
                q.mul_(stage.keep).add_(k, alpha=stage.mix)
        if q is not None:
            there = field.slope(here.time + last.c * h)
        _close(flat, last, there, q, h, unit)

    def predict(self, field: Field, here: Slope, h: float) -> Leg:
        """A whole Euler step as a leg: the first stage of a solver that can be controlled while it runs."""
        v = field.velocity(here)
        field.flat.theta.add_(v, alpha=h)
        return Leg(field.flat, v, h)

    @property
    def corrects(self) -> bool:
        """Whether a prediction is followed by a second stage."""
        return len(self.stages) > 1

    def correct(self, there: Slope, leg: Leg) -> None:
        """The last stage, given the slope at the end of the leg."""
        if self.corrects:
            _close(leg.flat, self.stages[-1], there, leg.v, leg.h, leg.h)


def _close(flat: FlatParams, last: Stage, there: Slope, q: Tensor | None, h: float, unit: float) -> None:
    """θ ← θ + a/over·h·v + b·q, without a vector for h·v."""
    flat.move(h * there.to_target * last.a / last.over, h * there.to_gradient * last.a / last.over)
    if q is not None:
        flat.theta.add_(q, alpha=last.b * unit)


_R = sqrt(0.5)

# θ + h v: exact wherever the path is straight.
EULER = Tableau(1, (Stage(c=0, a=1),))

# The trapezoidal predictor-corrector.
HEUN = Tableau(2, (Stage(c=0, a=1), Stage(c=1, a=1, over=2, b=-0.5)))

# Gill's form of the fourth-order method: one register where the classical tableau needs two.
GILL = Tableau(
    4,
    (
        Stage(c=0, a=0.5),
        Stage(c=0.5, a=1 - _R, b=-(1 - _R), keep=-2 + 3 * _R, mix=2 - 2 * _R),
        Stage(c=0.5, a=1 + _R, b=-(1 + _R), keep=-2 - 3 * _R, mix=2 + 2 * _R),
        Stage(c=1, a=1, over=6, b=-1 / 3),
    ),
    increments=True,
)

SOLVERS = {"euler": EULER, "heun": HEUN, "rk4": GILL}
