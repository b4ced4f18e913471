"""One loop from θ0 toward θ1: a field, a solver, a controller, and what is kept of the path."""

from __future__ import annotations

from mergeway.rules.ode.controllers import Controller
from mergeway.rules.ode.field import Field
from mergeway.rules.ode.path import Trajectory
from mergeway.rules.ode.solvers import Tableau
from mergeway.rules.ode.stops import Stops


def integrate(field: Field, solver: Tableau, controller: Controller, stops: Stops, name: str) -> Trajectory:
    """θ̇ = v(θ, t) from θ(0) = θ0 until the last stop (lines 4 to 18 of Algorithm 1, ODE-M)."""
    here = field.slope(0.0)
    path = Trajectory(stops.until, name, field.loss_start, field.loss_target, save=stops.save)
    path.note(here, field.flat)
    h = controller.first(stops)
    while here.time < stops.until:
        step = controller.advance(field, solver, here, stops, h)
        here, h = step.there, step.h
        path.shortened += step.shortened
        path.note(here, field.flat)
    return _finished(path, field)


def stay(field: Field, stops: Stops, name: str) -> Trajectory:
    """The path that does not leave θ0, because it ends there or nothing moves."""
    here = field.measure(0.0)
    path = Trajectory(stops.until, name, field.loss_start, field.loss_target)
    path.note(here, field.flat)
    return _finished(path, field)


def _finished(path: Trajectory, field: Field) -> Trajectory:
    path.evaluations, path.probes, path.infeasible = field.evaluations, field.probes, field.infeasible
    path.end = field.flat.release()
    return path
