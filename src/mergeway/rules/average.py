"""Running average (SWA): Ψ_k = (1 − η_k)Ψ_{k−1} + η_k ψ_k = ψ_0 + Σ w_i δ_i / W_k (Eq. 45-46, ODE-M; Eq. 32, OPCM)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mergeway.core.tensors import Part
from mergeway.rules.rule import Fold, PartRule, Removable, State


@dataclass(frozen=True)
class Average(Removable, PartRule):
    """The utility-weighted mean of all arrivals, kept as the sum Σ w_i δ_i."""

    name = "average"
    title = "running weighted mean of the arrivals"
    paper = "ODE-M Eq. 45; OPCM Eq. 32"

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        return {"sum": state["sum"].add(delta, alpha=at.weight)}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        return state["sum"] / at.total
