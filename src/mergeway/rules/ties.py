"""Continual TIES: trim both updates to their largest entries, elect a sign for each entry, add what agrees (Eq. 36-38, OPCM)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

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
        votes = look(lambda delta, m: int(torch.add(*self._trim(trimmed, delta, m)).sign_().sum()))
        return {**trimmed.facts, "majority": 1.0 if sum(votes) >= 0 else -1.0}

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        if at.step == 1:
            return {"update": self.scaling * delta}
        old, new = self._trim(at, delta, state)
        sign = _elected(old + new, at.facts["majority"])
        # What agrees with the elected sign is positive in its direction. (A mask would take three times as long.)
        agreed = old.mul_(sign).relu_() + new.mul_(sign).relu_()
        update = agreed.mul_(sign).mul_(self.scaling)
        return {"update": update.add_(state["update"] if self.form == "compound" else 0.0)}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        return state["update"]

    def _trim(self, at: Fold, delta: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Both candidates, weighted, without the entries below their thresholds."""
        old_share, new_share = (1 - at.eta, at.eta) if self.form == "mean" else (1.0, at.relative_weight)
        old, new = state["update"], delta
        return (
            _largest(old, at.facts["trim_old"]).mul_(old_share),
            _largest(new, at.facts["trim_new"]).mul_(new_share),
        )


def _largest(x: Tensor, threshold: float) -> Tensor:
    """A copy of x with zeros for the entries of magnitude below the threshold."""
    # hardshrink keeps what lies above its limit, so it gets the number just below the threshold.
    limit = torch.tensor(threshold, dtype=x.dtype)
    return hardshrink(x, float(torch.nextafter(limit, torch.tensor(-1.0, dtype=x.dtype))))


def _elected(total: Tensor, majority: float) -> Tensor:
    """The sign of each sum, where nothing counts as the majority."""
    # Zero has a sign too; adding zero makes it positive. (`total` is not needed again.)
    return torch.copysign(total.new_ones(()), total.mul_(majority).add_(0.0)).mul_(majority)
