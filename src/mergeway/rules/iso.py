"""Iso-C on the running sum: a matrix S = k·Σ w_i δ_i / W_k = U Σ Vᵀ becomes a·mean(σ)·U Vᵀ; everything else S/k."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mergeway.core.linalg import flat_spectrum
from mergeway.core.tensors import Part
from mergeway.rules.rule import Fold, PartRule, Removable, SeesMatrices, State


@dataclass(frozen=True)
class Iso(SeesMatrices, Removable, PartRule):
    """The sum of the updates with a flat spectrum: no task's directions drown another's.

    Deviates: singular values below 1e-6 of the largest count as zero and take no part in the mean, where the published
    formula pairs null vectors arbitrarily; a zero sum gives a zero update.
    """

    name = "iso"
    title = "sum of the updates with its spectrum flattened"
    paper = "Iso-C, made online; not in the three papers"

    scaling: float = 1.0
    linear: str | None = None

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        return {"sum": state["sum"].add(delta, alpha=at.weight)}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        if part.matrix is None:
            return state["sum"] / at.total
        return flat_spectrum(state["sum"]) * (self.scaling / at.mean_weight)
