"""Continual task arithmetic: Ψ_k = ψ_0 + λ Σ δ_i (Eq. 35, OPCM) or ψ_0 + λ Σ w_i δ_i / W_k (Eq. 48-49, ODE-M)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mergeway.core.tensors import Part
from mergeway.rules.rule import Fold, PartRule, Removable, State


@dataclass(frozen=True)
class TaskArithmetic(Removable, PartRule):
    """Scaled sum of the task vectors.

    Deviates: Eq. 35 knows no utilities; with `form=sum` a task vector counts w_i against the mean weight, so equal weights
    give the printed rule.
    """

    name = "task-arithmetic"
    title = "scaled sum (or mean) of the task vectors"
    paper = "OPCM Eq. 35; ODE-M Eq. 48-49"

    scaling: float = 0.3
    form: Literal["sum", "mean"] = "sum"

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        return {"sum": state["sum"].add(delta, alpha=at.weight)}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        divisor = at.mean_weight if self.form == "sum" else at.total
        return state["sum"] * (self.scaling / divisor)
