"""ODE-M: follow the barrier-aware trajectory from the deployed model toward the arrival and stop at t_k (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mergeway.rules.fold import Fold, Params, Whole
from mergeway.rules.ode import operating_time, trajectory
from mergeway.rules.ode.path import Trajectory, check_options
from mergeway.rules.ode.released import refine
from mergeway.rules.options import check_range
from mergeway.rules.rule import Rule


@dataclass(frozen=True)
class Ode(Rule):
    """Ψ_k = θ(t_k) with θ̇ = u⊥ + γu∥, θ(0) = Ψ_{k−1}, target ψ_k and t_k = w_k/W_k (Eq. 10-18); Ψ_1 = ψ_1.

    The defaults are the paper's. Whenever γ ≡ 1 the path is straight and the rule equals `average`. `guidance`, `task_norm`,
    `barrier=per-task` and `refine` are the released code's mechanisms; `preset=released` sets them as it does.

    Deviates: the last step lands on t_k, where the paper's loop overshoots.
    """

    name = "ode"
    title = "barrier-aware trajectory toward the arrival"
    paper = "ODE-M Algorithm 1"
    slots = ("model",)
    needs = frozenset({"calibration"})
    whole = True
    by_rows = True

    step: float = 0.05
    solver: Literal["euler", "heun", "rk4", "adaptive"] = "euler"
    certify: bool = False
    time: float | None = None
    guidance: float = 0.0
    metric: Literal["euclidean", "layer", "diagonal"] = "euclidean"
    task_norm: float = 0.0
    barrier: Literal["none", "path", "per-task"] = "path"
    refine: int = 0
    preset: Literal["paper", "released"] = "paper"

    def __post_init__(self) -> None:
        check_range(self, "guidance", 0.0, float("inf"))
        check_range(self, "task_norm", 0.0, float("inf"))
        check_range(self, "refine", 0, float("inf"))
        if self.time is not None:
            check_range(self, "time", 0.0, 1.0)
        chosen = self.chosen()
        check_options(chosen.solver, chosen.step, chosen.certify, chosen.metric, chosen.barrier)

    def merge(self, at: Fold, base: Params, memory: dict[str, Params], arrival: Params, objective: Any) -> Whole:
        if at.step == 1:
            return Whole({"model": arrival}, arrival)
        until = operating_time(at.weight, at.total, self.chosen().time)
        path = self.path(memory["model"], arrival, objective, until)
        facts = {
            "time": path.until,
            "gradients": path.evaluations,
            "barrier": path.barrier,
            "bound": path.bound,
            "gamma": min(path.gammas),
        }
        return Whole({"model": path.end}, path.end, facts, {"trajectory": path.summary()})

    def path(
        self, start: Params, target: Params, objective: Any, until: float, save: Sequence[float] = ()
    ) -> Trajectory:
        """The way from `start` toward `target` with this rule's options."""
        chosen = self.chosen()
        return trajectory(
            start,
            target,
            objective,
            until,
            chosen.solver,
            chosen.step,
            chosen.certify,
            guidance=chosen.guidance,
            metric=chosen.metric,
            task_norm=chosen.task_norm,
            barrier=chosen.barrier,
            save=save,
        )

    def polish(self, deployed: Params, objective: Any) -> tuple[Params, dict[str, Any]] | None:
        steps = self.chosen().refine
        return refine(deployed, objective, steps) if steps else None

    def chosen(self) -> Ode:
        """The options in force: a preset fills in what was left at its default."""
        if self.preset == "paper":
            return self
        left = {k: v for k, v in _RELEASED.items() if getattr(self, k) == getattr(Ode, k)}
        return replace(self, **left, preset="paper")


_RELEASED = {"step": 0.01, "guidance": 0.24, "task_norm": 0.25, "barrier": "per-task", "refine": 80}
