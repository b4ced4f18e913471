"""Iso-C on the running sum: a matrix S = k·Σ w_i δ_i / W_k = U Σ Vᵀ becomes a·mean(σ)·U Vᵀ; everything else S/k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from torch import Tensor

from mergeway.core.linalg import flat_spectrum, squared_norm
from mergeway.core.tensors import Part
from mergeway.rules.rule import Fold, PartRule, Removable, SeesMatrices, Settles, State

LONGEST = 1.5  # a·mean(σ)·U Vᵀ is then about as long as S itself,
SHORTEST = 1.8  # and with this over k a quarter longer than the mean S/k
REACH = 0.09  # how far from the base updates that do not agree may lead, roughly as a share of its norm


def length_without_data(k: int, base: float, total: float, spread: float) -> float:
    """a of `scaling=auto` from squared norms over all linear weights: ‖ψ_0‖², ‖Σ w_i δ_i‖² and Σ w_i‖δ_i‖²."""
    a = REACH * sqrt(base * total) / spread  # a weight divides both sums alike
    return min(LONGEST, max(SHORTEST / k, a))


@dataclass(frozen=True)
class Iso(SeesMatrices, Settles, Removable, PartRule):
    """The sum of the updates with a flat spectrum: no task's directions drown another's.

    `scaling=auto` takes a from the checkpoints alone: a·‖S‖ = 0.09·A²·‖ψ_0‖ with the agreement A² = ‖S‖²/Σ‖δ_i‖², norms over
    all linear weights: as far as the updates agree, but 1.8/k ≤ a ≤ 1.5, so not shorter than the mean nor longer than S.

    Deviates: singular values below 1e-6 of the largest count as zero and take no part in the mean, where the published
    formula pairs null vectors arbitrarily; a zero sum gives a zero update.
    """

    name = "iso"
    title = "sum of the updates with its spectrum flattened"
    paper = "Iso-C, made online; not in the three papers"

    scaling: float | Literal["auto"] = 1.0
    linear: str | None = None

    @property
    def settles(self) -> bool:
        return self.scaling == "auto"

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        return {"sum": state["sum"].add(delta, alpha=at.weight)}

    def tally(self, at: Fold, part: Part, base: Tensor, delta: Tensor, before: State, after: State) -> dict[str, float]:
        if part.matrix is None:
            return {}
        return {"base": squared_norm(base), "update": squared_norm(delta), "sum": squared_norm(after["sum"])}

    def settle(self, at: Fold, sums: Mapping[str, float]) -> dict[str, float]:
        spread = at.facts.get("spread", 0.0) + at.weight * sums.get("update", 0.0)  # Σ w_i‖δ_i‖²
        if not spread > 0:
            return {"spread": 0.0, "scaling": 1.0}
        return {"spread": spread, "scaling": length_without_data(at.step, sums["base"], sums["sum"], spread)}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        if part.matrix is None:
            return state["sum"] / at.total
        a = at.facts["scaling"] if self.scaling == "auto" else self.scaling
        return flat_spectrum(state["sum"]) * (a / at.mean_weight)
