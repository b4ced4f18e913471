"""MagMax (MaxAbs in Holistic CMM): each entry of the update is the one of largest magnitude over all arrivals, scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergeway.core.tensors import Part
from mergeway.rules.rule import Fold, PartRule, State


@dataclass(frozen=True)
class Magmax(PartRule):
    """Running entry of largest magnitude; the earlier arrival wins a draw.

    Deviates: the rule knows no utilities; here w_i δ_i compete and the winner is divided by the mean weight, so equal
    weights give the printed rule.
    """

    name = "magmax"
    title = "entry of largest magnitude over all arrivals"
    paper = "Holistic CMM, baseline MaxAbs"
    slots = ("largest",)

    scaling: float = 0.5

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        largest, incoming = state["largest"], at.weight * delta
        return {"largest": torch.where(incoming.abs() > largest.abs(), incoming, largest)}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        return state["largest"] * (self.scaling / at.mean_weight)
