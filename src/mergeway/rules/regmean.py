"""RegMean, online: W minimises Σ w_i ‖X_i W − X_i W_i‖², and the Gram matrices G_i = X_iᵀX_i only ever enter as sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergeway.core.linalg import symmetric_inverse
from mergeway.core.tensors import Part
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, SeesMatrices, State, WantsGrams


@dataclass(frozen=True)
class Regmean(SeesMatrices, WantsGrams):
    """Δ = (Σ w_i δ_i G_i)(Σ w_i G_i)⁻¹ for linear weights, the mean for the rest; off-diagonal entries of G_i count `scale` times.

    Deviates: where no input ever pointed (the null space of Σ w_i G_i) the mean stands in for the paper's singular inverse,
    and G_i is divided by its number of rows, so that utilities and not data sizes say who counts.
    """

    name = "regmean"
    title = "least squares on the inputs of every linear layer"
    paper = "RegMean (Jin et al. 2023), made online"
    slots = ("sum", "product", "gram")

    scale: float = 0.9
    linear: str | None = None

    def __post_init__(self) -> None:
        check_range(self, "scale", 0.0, 1.0)

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State, extra: Tensor | None = None) -> State:
        total = state["sum"].add(delta, alpha=at.weight)
        if part.matrix is None or extra is None:
            return state | {"sum": total}
        gram = self.scale * extra + (1 - self.scale) * torch.diag(extra.diagonal())
        product = (delta.double() @ gram.double()).to(delta.dtype)
        return {
            "sum": total,
            "product": state["product"].add(product, alpha=at.weight),
            "gram": state["gram"].add(gram, alpha=at.weight),
        }

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        mean = state["sum"] / at.total
        if part.matrix is None or not bool(state["gram"].any()):
            return mean
        gram = state["gram"].double()
        rest = state["product"].double() - mean.double() @ gram
        solved = rest @ symmetric_inverse(gram)
        return mean + solved.to(mean.dtype)

    def slot_shape(self, slot: str, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """G is as wide as the layer's input; what is no linear weight needs no more than its sum."""
        if slot == "sum":
            return shape
        if not self.sees_matrix(name, shape) or len(shape) != 2:
            return (0,)
        return shape if slot == "product" else (shape[1], shape[1])
