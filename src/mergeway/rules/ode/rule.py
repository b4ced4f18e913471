"""ODE-M: follow the barrier-aware trajectory from the deployed model toward the arrival and stop at t_k (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor

from mergeway.calibration.objective import Loss, Objective, as_objective
from mergeway.core.ranks import ALONE, Team
from mergeway.rules.ode.metric import Metric
from mergeway.rules.ode.path import Trajectory
from mergeway.rules.ode.plan import TOLERANCE, Barrier, Plan, Solver
from mergeway.rules.ode.presets import PRESETS, left_alone
from mergeway.rules.ode.released_refine import REFINEMENTS
from mergeway.rules.ode.schedule import operating_time
from mergeway.rules.ode.solve import follow
from mergeway.rules.ode.stream import StreamBound, audit, nothing_risen
from mergeway.rules.options import check_range
from mergeway.rules.rule import ByRows, Fold, Incoming, KeepsDeployed, Merged, ModelRule, Params, State, WantsSamples


@dataclass(frozen=True)
class Ode(WantsSamples, ByRows, KeepsDeployed, ModelRule):
    """Ψ_k = θ(t_k) with θ̇ = u⊥ + γu∥, θ(0) = Ψ_{k−1}, target ψ_k and t_k = w_k/W_k (Eq. 10-18); Ψ_1 = ψ_1.

    The defaults are the paper's. Whenever γ ≡ 1 the path is straight and the rule equals `average`. `guidance`, `task_norm`,
    `barrier` and `refine` are the released code's mechanisms; `preset=released` sets them as it does, `exact` solves them.

    Deviates: the last step lands on t_k, where the paper's loop overshoots.
    """

    name = "ode"
    title = "barrier-aware trajectory toward the arrival"
    paper = "ODE-M Algorithm 1"
    slots = ("model",)

    step: float = 0.05
    solver: Solver = "euler"
    certify: bool | Literal["stream"] = False
    budget: float = 0.05
    time: float | None = None
    guidance: float = 0.0
    metric: Metric = "euclidean"
    task_norm: float = 0.0
    barrier: Barrier = "path"
    refine: int = 0
    refine_by: Literal["plain", "released"] = "plain"
    preset: Literal["paper", "exact", "released"] = "paper"

    def __post_init__(self) -> None:
        for option in ("budget", "guidance", "task_norm", "refine"):
            check_range(self, option, 0.0, float("inf"))
        if self.time is not None:
            check_range(self, "time", 0.0, 1.0)
        self.plan()

    def merge(self, at: Fold, given: Incoming) -> Merged:
        objective, arrival = given.objective, {**given.arrival}
        if at.step == 1:
            return Merged({"model": arrival}, arrival, nothing_risen(objective) if self.certify else {})
        until, start = operating_time(at.weight, at.total, self.chosen().time), {**given.state["model"]}
        walk = partial(self.path, start, arrival, objective, team=given.team)
        bound = StreamBound(at.facts, self.budget)
        path = bound.shortened(walk, start, until, objective) if self.certify == "stream" else walk(until)
        facts, details = path.facts(), dict[str, object](trajectory=path.summary())
        if self.certify and objective.tasks:
            details["stream"], rises = audit(objective, start, arrival, path, bound)
            facts |= rises
        return Merged({"model": path.end}, path.end, facts, details)

    def path(
        self, start: Params, target: Params, loss: Loss, until: float, save: Sequence[float] = (), team: Team = ALONE
    ) -> Trajectory:
        """The trajectory from `start` toward `target` with this rule's options."""
        return follow(start, target, as_objective(loss), until, self.plan(), save, team)

    def changed(self, state: State, base: Tensor, deployed: Tensor) -> State:
        return {"model": deployed}

    def finish(
        self, deployed: Params, objective: Objective, team: Team = ALONE
    ) -> tuple[Params, dict[str, object]] | None:
        o = self.chosen()
        refined = REFINEMENTS[o.refine_by](deployed, objective, o.refine, team=team) if o.refine else None
        return refined and (refined[0], {"refine": refined[1]})

    def plan(self) -> Plan:
        """The options in force as those of a trajectory."""
        o = self.chosen()
        return Plan(o.solver, o.step, o.certify is True, TOLERANCE, o.guidance, o.metric, o.task_norm, o.barrier)

    def chosen(self) -> Ode:
        """The options in force: a preset fills in what was left at its default."""
        filled = left_alone(self, PRESETS[self.preset])
        return replace(self, **filled, preset="paper") if filled else self
