"""How long a step is: fixed, shortened until a loss bound holds, or controlled by its error."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Protocol

from mergeway.rules.ode.barrier import Ceilings
from mergeway.rules.ode.field import Field, Slope
from mergeway.rules.ode.flat import chunks
from mergeway.rules.ode.solvers import EULER, Leg, Tableau
from mergeway.rules.ode.stops import Stops

HALVINGS = 8  # how often a step is halved before it is taken as it is, uncertified

SHRINK, SCALES = 0.7, 9  # backtracking: 1, 0.7, 0.49 …; the released code tries one scale less

LOOKS = 8  # an adaptive path is looked at in at least this many places, however straight it is
MOST_STEPS = 500  # and its steps are not shortened below this part of it
CREDIT = 4.0  # how much better Heun's step is than its distance from Euler's says, at least, on all paths measured
SAFETY = 0.9  # of the step that would just meet the tolerance
SHORTEN = (0.2, 0.7)  # bounds of the factor after a step that was too long
LENGTHEN = (0.5, 5.0)  # bounds of the factor after a step that was taken


@dataclass(frozen=True)
class Step:
    """A step that was taken: what is seen at its end, how often it was shortened, how long the next may be."""

    there: Slope
    shortened: int
    h: float


class Controller(Protocol):
    """Chooses the length of each step and takes it with the solver."""

    def first(self, stops: Stops) -> float:
        """How long the first step may be."""
        ...

    def advance(self, field: Field, solver: Tableau, here: Slope, stops: Stops, h: float) -> Step:
        """One step of at most h from `here`, the point of the field's last slope."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Equal steps, the last one cut."""

    step: float

    def first(self, stops: Stops) -> float:
        return self.step

    def advance(self, field: Field, solver: Tableau, here: Slope, stops: Stops, h: float) -> Step:
        h = stops.step_from(here.time, h)
        t = stops.landed(here.time, h)
        # A stage at t = 1 would divide by zero; there only Euler's step, which needs no stage, is defined.
        (EULER if here.time + h >= 1.0 else solver).advance(field, here, h)
        return Step(field.look(t, here, stops.until), 0, self.step)


@dataclass(frozen=True)
class Certified:
    """Euler steps, each halved until the envelope holds where it ends; one that never does is taken whole and shows."""

    step: float

    def first(self, stops: Stops) -> float:
        return self.step

    def advance(self, field: Field, solver: Tableau, here: Slope, stops: Stops, h: float) -> Step:
        def look() -> Slope:
            return field.look(stops.landed(here.time, leg.h), here, stops.until)

        whole = stops.step_from(here.time, h)
        leg = solver.predict(field, here, whole)
        there, shortened = look(), 0
        # A path that is above the envelope already cannot be brought back by shorter steps.
        while field.holds(here) and not field.holds(there) and shortened < HALVINGS:
            leg.resize(leg.h / 2)
            shortened += 1
            there = look()
        if not field.holds(there) and leg.h < whole:
            leg.resize(whole)
            there = look()
        return Step(there, shortened, self.step)


@dataclass(frozen=True)
class Adaptive:
    """Steps as long as the error allows: Heun's distance from Euler's step is the error; straight stretches cost one look.

    The path as a whole may be off by `tolerance` times the distance to the target, each step by its share. With `certify` a
    step is also shortened until the envelope holds where it ends; its solver is then Euler's, whose end that is.
    """

    tolerance: float
    certify: bool = False

    def first(self, stops: Stops) -> float:
        return stops.until / LOOKS

    def advance(self, field: Field, solver: Tableau, here: Slope, stops: Stops, h: float) -> Step:
        budget = CREDIT * self.tolerance * field.length
        shortest = stops.until / MOST_STEPS
        leg = solver.predict(field, here, stops.step_from(here.time, min(h, stops.until / LOOKS)))
        shortened = 0
        while True:
            t = stops.landed(here.time, leg.h)
            there = field.slope(t) if t < 1.0 else field.measure(t, here)
            error = 0.5 * leg.h * _change(field, there, leg) if there.to_target else 0.0
            fits = error <= budget * leg.h
            if leg.h <= shortest or (fits and self._allowed(field, here, there)):
                break
            factor = _factor(budget, leg.h, error, SHORTEN) if not fits else 0.5
            leg.resize(max(shortest, leg.h * factor))
            shortened += 1
        growth = _factor(budget, leg.h, error, LENGTHEN) if error else LENGTHEN[1]
        straight = (here.straight and there.straight) or not there.to_target
        if solver.corrects and not straight:
            solver.correct(there, leg)
            there = field.look(t, here, stops.until)
        return Step(there, shortened, max(shortest, leg.h * growth))

    def _allowed(self, field: Field, here: Slope, there: Slope) -> bool:
        return not self.certify or field.holds(there) or not field.holds(here)


@dataclass(frozen=True)
class Backtracking:
    """The released code's steps: shortened by 0.7 until no task is above its ceiling, and not taken when no scale is left."""

    step: float
    ceilings: Ceilings
    scales: int = SCALES

    def first(self, stops: Stops) -> float:
        return self.step

    def advance(self, field: Field, solver: Tableau, here: Slope, stops: Stops, h: float) -> Step:
        h = stops.step_from(here.time, h)
        leg = solver.predict(field, here, h)
        shortened = 0
        while shortened < self.scales and not self.ceilings.hold(field.task_losses(), here.time + h):
            shortened += 1
            leg.resize(leg.h * SHRINK if shortened < self.scales else 0.0)
        there = field.look(stops.landed(here.time, h), here, stops.until)
        return Step(there, shortened, self.step)


def _factor(budget: float, h: float, error: float, bounds: tuple[float, float]) -> float:
    """By how much a step may change so that its error, which grows with h², meets the budget."""
    return min(max(SAFETY * sqrt(budget * h / error), bounds[0]), bounds[1])


def _change(field: Field, there: Slope, leg: Leg) -> float:
    """‖v2 − v1‖, with v1 that of the leg and v2 given by the slope at its end, a chunk at a time."""
    flat, total = field.flat, 0.0
    for part in chunks(flat.theta):
        v2 = (
            there.to_target * (flat.target[part].double() - flat.theta[part].double())
            + there.to_gradient * flat.grad[part].double()
        )
        change = v2 - leg.v[part].double()
        total += float(change @ change)
    return sqrt(flat.team.add_up([total])[0])
