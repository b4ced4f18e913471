"""Fixed-step solvers: each advances θ by one step, given the slope at its start."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from mergeway.rules.ode.field import Field, Slope

Step = Callable[[Field, Slope, float], None]


def euler(field: Field, slope: Slope, h: float) -> None:
    """θ ← θ + h v: a lerp and an axpy; exact wherever the path is straight."""
    field.flat.move(h * slope.along, h * slope.across)


def heun(field: Field, slope: Slope, h: float) -> None:
    """The trapezoidal predictor-corrector, second order."""
    flat = field.flat
    v1 = flat.velocity_into(flat.spare, slope.along, slope.across)
    flat.theta.add_(v1, alpha=h)
    there = field.slope(slope.time + h)
    flat.move(0.5 * h * there.along, 0.5 * h * there.across)
    flat.theta.add_(v1, alpha=-0.5 * h)


def rk4(field: Field, slope: Slope, h: float) -> None:
    """Fourth order in Gill's form, which needs one register where the classical tableau needs two."""
    flat, t, r = field.flat, slope.time, sqrt(0.5)
    q = flat.velocity_into(flat.spare, slope.along, slope.across).mul_(h)
    flat.theta.add_(q, alpha=0.5)
    for share, mix, keep, time in (
        (1 - r, 2 - 2 * r, -2 + 3 * r, t + h / 2),
        (1 + r, 2 + 2 * r, -2 - 3 * r, t + h / 2),
    ):
        there = field.slope(time)
        k = flat.velocity_into(flat.grad, h * there.along, h * there.across)
        flat.theta.add_(k, alpha=share).add_(q, alpha=-share)
        q.mul_(keep).add_(k, alpha=mix)
    there = field.slope(t + h)
    flat.move(h * there.along / 6, h * there.across / 6)
    flat.theta.add_(q, alpha=-1 / 3)


STEPS: dict[str, Step] = {"euler": euler, "heun": heun, "rk4": rk4}
