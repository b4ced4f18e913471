"""Continual TIES: trim both updates to their largest entries, elect a sign for each entry, add what agrees (Eq. 36-38, OPCM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mergeway.core.tensors import Part
from mergeway.core.threshold import nth_largest, search_together
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, KeepsDeployed, Look, PartRule, State, Surveys


@dataclass(frozen=True)
class Ties(Surveys, KeepsDeployed, PartRule):
    """Pairwise TIES between the accumulated update Δ_{k−1} = Ψ_{k−1} − ψ_0 and the incoming δ_k.

    `form=base`: Ψ_k = ψ_0 + λ·TIES(Δ, δ) (Eq. 38); `form=compound`: Ψ_k = Ψ_{k−1} + λ·TIES(Δ, δ), as FusionBench computes
    it; `form=mean`: ψ_0 + λ·TIES((1−η)Δ, ηδ) (Eq. 52-53, ODE-M). The first arrival is taken whole: Ψ_1 = ψ_0 + λδ_1.

    Deviates: Eq. 38 knows no utilities; in the forms `base` and `compound` δ_k counts w_k against the mean weight before it.
    Entries equal to the threshold are kept.
    """

    name = "ties"
    title = "trim, elect signs, add what agrees"
    paper = "OPCM Eq. 36-38; ODE-M Eq. 50-53"
    slots = ("update",)

    density: float = 0.2
    scaling: float = 0.3
    form: Literal["base", "compound", "mean"] = "base"

    def __post_init__(self) -> None:
        check_range(self, "density", 0.0, 1.0)

    def survey(self, at: Fold, size: int, look: Look) -> dict[str, float]:
        if at.step == 1:
            return {"trim_old": 0.0, "trim_new": 0.0, "majority": 1.0}
        searches = [nth_largest(size, int(self.density * size)) for _ in ("old", "new")]
        old, new = search_together(lambda looks: look(lambda delta, m: looks(m["update"], delta)), searches)
        trimmed = at.settled({"trim_old": old, "trim_new": new})
        votes = look(lambda delta, m: int(torch.sign(torch.add(*self._trim(trimmed, delta, m))).sum(dtype=torch.int64)))
        return {**trimmed.facts, "majority": 1.0 if sum(votes) >= 0 else -1.0}

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        if at.step == 1:
            return {"update": self.scaling * delta}
        old, new = self._trim(at, delta, state)
        total = old + new
        positive = (total > 0) | ((total == 0) & (at.facts["majority"] > 0))
        agreed = torch.where(positive, old.clamp_min(0) + new.clamp_min(0), old.clamp_max(0) + new.clamp_max(0))
        start = state["update"] if self.form == "compound" else 0.0
        return {"update": start + self.scaling * agreed}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        return state["update"]

    def _trim(self, at: Fold, delta: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Both candidates, weighted, without the entries below their thresholds."""
        old_share, new_share = (1 - at.eta, at.eta) if self.form == "mean" else (1.0, at.relative_weight)
        old = state["update"]
        return (
            old * (old.abs() >= at.facts["trim_old"]) * old_share,
            delta * (delta.abs() >= at.facts["trim_new"]) * new_share,
        )
