"""How long a step is: fixed and landing on the end, shortened until the loss envelope holds, or controlled by its error."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from mergeway.core.ranks import team
from mergeway.rules.ode.field import Field, Slope
from mergeway.rules.ode.flat import FlatParams

if TYPE_CHECKING:
    from mergeway.rules.ode.path import Trajectory

HALVINGS = 8  # how often a step is shortened before it is taken as it is, uncertified
CREDIT = 4.0
LOOKS = 8  # an adaptive path is looked at in at least this many places, however straight it is


def next_step(t: float, step: float, until: float) -> float:
    """The step from t, stretched or cut by rounding's width so that the last one ends at `until` exactly."""
    left = until - t
    return left if left <= step * (1 + 1e-9) else step


def landed(t: float, h: float, made: Trajectory) -> float:
    """t + h, or the stop it was meant to reach, free of rounding."""
    stop = made.next_stop(t)
    return stop if abs(stop - t - h) <= 1e-12 else t + h


def within_envelope(t: float, loss: float, loss_start: float, gap: float) -> bool:
    """L(θ(t)) ≤ L(θ0) + t·max(ΔL, 0) (Eq. 16), with room for the rounding of a float32 loss."""
    return loss <= loss_start + t * max(gap, 0.0) + 1e-6 * max(1.0, abs(loss_start))


def certified_steps(walk: Field, made: Trajectory, slope: Slope, step: float) -> None:
    """Euler steps, each halved until the envelope holds where it ends; one that never does is taken whole and shows."""
    flat, t = walk.flat, 0.0
    while True:
        made.note(slope, walk.flat)
        whole = h = next_step(t, step, made.next_stop(t))
        v = flat.velocity_into(flat.spare, slope.along, slope.across)
        flat.theta.add_(v, alpha=h)
        there = _look(walk, made, landed(t, h, made))
        # A path that is above the envelope already cannot be brought back by shorter steps.
        for _ in range(HALVINGS if _holds(made, slope) else 0):
            if _holds(made, there):
                break
            flat.theta.add_(v, alpha=-h / 2)
            h /= 2
            made.shortened += 1
            there = _look(walk, made, landed(t, h, made))
        if not _holds(made, there) and h < whole:
            flat.theta.add_(v, alpha=whole - h)
            h, there = whole, _look(walk, made, landed(t, whole, made))
        t = landed(t, h, made)
        slope = there
        if t >= made.until:
            made.note(slope, walk.flat)
            return


def adaptive_steps(walk: Field, made: Trajectory, slope: Slope, tolerance: float, certify: bool) -> None:
    """Steps as long as the error allows: Heun's step, its distance from Euler's as the error; straight stretches cost one look.

    The path as a whole may be off by `tolerance` times the way to the end, each step by its share. Heun's step is better than
    its distance from Euler's says, by the factor CREDIT at least on all paths that were measured.
    """
    flat, until = walk.flat, made.until
    budget = CREDIT * tolerance * slope.distance
    limit = h = until / LOOKS
    shortest = until / 500
    t = 0.0
    while True:
        made.note(slope, walk.flat)
        h = next_step(t, min(h, limit), made.next_stop(t))
        v = flat.velocity_into(flat.spare, slope.along, slope.across)
        flat.theta.add_(v, alpha=h)
        while True:
            there = _look(walk, made, landed(t, h, made)) if t + h >= 1.0 else walk.slope(t + h)
            error = 0.5 * h * _change(flat, there) if there.along else 0.0
            fits = error <= budget * h
            if h <= shortest or (fits and (not certify or _holds(made, there) or not _holds(made, slope))):
                break
            shorter = max(shortest, h * (0.5 if fits else min(max(0.9 * sqrt(budget * h / error), 0.2), 0.7)))
            flat.theta.add_(v, alpha=shorter - h)
            made.shortened += 1
            h = shorter
        t = landed(t, h, made)
        growth = 5.0 if error == 0.0 else min(max(0.9 * sqrt(budget * h / error), 0.5), 5.0)
        straight = (slope.straight and there.straight) or not there.along
        if straight or certify:
            slope = there
        else:
            flat.move(0.5 * h * there.along, 0.5 * h * there.across)
            flat.theta.add_(v, alpha=-0.5 * h)
            if t >= until:
                return
            slope = walk.slope(t)
        if t >= until:
            made.note(slope, walk.flat)
            return
        h *= growth


def _holds(made: Trajectory, there: Slope) -> bool:
    return within_envelope(there.time, there.loss, made.loss_start, made.gap)


def _look(walk: Field, made: Trajectory, t: float) -> Slope:
    """The slope at t; at the end only the loss, which costs no gradient."""
    if t < made.until:
        return walk.slope(t)
    made.probes += 1
    loss, distance = walk.measure(made.until)
    return Slope(made.until, loss, made.gammas[-1], made.alignments[-1], distance, 0.0, 0.0)


def _change(flat: FlatParams, there: Slope) -> float:
    """‖v2 − v1‖, with v1 in `spare` and v2 given by the slope, a chunk at a time."""
    total = 0.0
    for i in range(0, flat.theta.numel(), 1 << 20):
        part = slice(i, i + (1 << 20))
        v2 = (
            there.along * (flat.target[part].double() - flat.theta[part].double())
            + there.across * flat.grad[part].double()
        )
        change = v2 - flat.spare[part].double()
        total += float(change @ change)
    return sqrt(team().add_up([total])[0])
