"""Fisher merging from optimiser moments: θ* = (λ v_t θ_t + (1 − λ) v θ*) / (λ v_t + (1 − λ) v), v ← the denominator (Eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mergeway.core.tensors import Part
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, KeepsDeployed, State, WantsMoments


@dataclass(frozen=True)
class Fisher(KeepsDeployed, WantsMoments):
    """Every entry goes to whoever cares: v is Adam's second moment, standing in for the Fisher information's diagonal.

    With `lam=utility`, λ_k = w_k/W_k and the result is Σ w_i v_i θ_i / Σ w_i v_i, whatever the order.

    Deviates: a number λ is tilted by the arrival's weight, λ' = λ r/(λ r + 1 − λ) with r = w_k over the mean weight before it, so
    that equal weights give the paper's formula.

    Deviates: where nobody cares (λ v_t + (1 − λ) v = 0), and for parameters that come without moments, the mean of the
    arrivals; the paper's quotient is 0/0 there.
    """

    name = "fisher"
    title = "mean weighted by the optimiser's second moments"
    paper = "Holistic CMM Eq. 4, Algorithm 1"
    slots = ("update", "moments")

    lam: float | Literal["utility"] = 0.4
    debias: bool = False

    def __post_init__(self) -> None:
        if self.lam != "utility":
            check_range(self, "lam", 0.0, 1.0)

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State, extra: Tensor | None = None) -> State:
        update, moments = state["update"], state["moments"]
        mean = update + at.eta * (delta - update)
        if extra is None:
            return {"update": mean, "moments": moments}
        if at.step == 1:
            return {"update": delta, "moments": extra}
        lam = at.eta if isinstance(self.lam, str) else _tilted(self.lam, at.relative_weight)
        new, total = lam * extra, lam * extra + (1 - lam) * moments
        # One share instead of two products: a quotient of numbers near 1e-20 that never leaves [0, 1].
        weighted = update + new / total * (delta - update)
        return {"update": torch.where(total > 0, weighted, mean), "moments": total}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        return state["update"]


def _tilted(lam: float, r: float) -> float:
    """λ' with λ'/(1 − λ') = r λ/(1 − λ); λ itself for r = 1, to the bit."""
    return lam if r == 1.0 else lam * r / (lam * r + 1 - lam)
