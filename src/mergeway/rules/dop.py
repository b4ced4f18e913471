"""DOP: dual orthogonal projections, a data-free optimisation of each linear weight between the merged and the new model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mergeway.core.linalg import dot, thin_svd
from mergeway.core.tensors import Part
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, KeepsDeployed, PartRule, SeesMatrices, State

ENERGY = 0.99999  # share of Σσ whose singular vectors are kept
EMA = 0.999  # how slowly the loss weights follow the min-norm solution
BETAS, EPSILON = (0.9, 0.999), 1e-8  # Adam's, at their usual values


@dataclass(frozen=True)
class Dop(SeesMatrices, KeepsDeployed, PartRule):
    """Minimises Σ_i a_i L_i(W), L_i = ‖Σ_i U_iᵀ(W − W_i)‖² + ‖(W − W_i)V_i Σ_i‖² over i ∈ {merged, new} with Adam.

    U, Σ, V belong to W_i − W_0. The weights a start at (alpha, 1 − alpha) and follow the min-norm combination of the two
    gradients, each divided by its loss, as a moving average. Other tensors are averaged pairwise, as in FusionBench.

    Deviates: the rule knows no utilities; here w_k against the mean weight before it tilts alpha, the starting point and
    the average, so equal weights give the published rule.
    """

    name = "dop"
    title = "data-free dual orthogonal projections"
    paper = "Dual Projections (NeurIPS 2025), as in FusionBench"
    slots = ("update",)

    steps: int = 200
    lr: float = 1e-4
    alpha: float = 0.8
    linear: str | None = None

    def __post_init__(self) -> None:
        check_range(self, "steps", 0, float("inf"))
        check_range(self, "lr", 0.0, float("inf"))
        check_range(self, "alpha", 0.0, 1.0)

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        if at.step == 1:
            return {"update": delta}
        merged = state["update"]
        share = at.relative_weight / (1 + at.relative_weight)
        start = torch.lerp(merged, delta, share)
        if part.matrix is None:
            return {"update": start}
        old, new = self.alpha * (1 - share), (1 - self.alpha) * share
        return {"update": self._optimise(start, (merged, delta), old / (old + new))}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        return state["update"]

    def _optimise(self, start: Tensor, targets: tuple[Tensor, Tensor], weight: float) -> Tensor:
        """Adam on the weighted losses; `weight` is that of the merged model."""
        sides = [_sides(target) for target in targets]
        w, first, second = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
        for step in range(1, self.steps + 1):
            gaps = [w - target for target in targets]
            grads = [2 * (left(gap) + right(gap.mT).mT) for gap, (left, right) in zip(gaps, sides, strict=True)]
            # A quadratic form is half the inner product of its argument and its gradient.
            losses = [dot(gap, grad) / 2 for gap, grad in zip(gaps, grads, strict=True)]
            if min(losses) > 0:
                weight = EMA * weight + (1 - EMA) * _min_norm(grads[0] / losses[0], grads[1] / losses[1])
            grad = torch.lerp(grads[1], grads[0], weight)
            first.lerp_(grad, 1 - BETAS[0])
            second.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
            scale = second.sqrt().div_((1 - BETAS[1] ** step) ** 0.5).add_(EPSILON)
            w.addcdiv_(first, scale, value=-self.lr / (1 - BETAS[0] ** step))
        return w


def _sides(update: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """x ↦ U Σ² Uᵀ x and x ↦ V Σ² Vᵀ x of an update, cut at ENERGY of its singular values."""
    u, sigma, v = thin_svd(update)
    r = int((sigma.cumsum(0) < ENERGY * sigma.sum()).sum())
    return [_squared((side[:, :r] * sigma[:r]).to(update.dtype)) for side in (u, v)]


def _squared(basis: Tensor) -> Callable[[Tensor], Tensor]:
    """x ↦ B Bᵀ x, in the order that multiplies less."""
    if basis.shape[0] > 2 * basis.shape[1]:
        return lambda x: basis @ (basis.mT @ x)
    gram = basis @ basis.mT
    return lambda x: gram @ x


def _min_norm(a: Tensor, b: Tensor) -> float:
    """The weight of `a` in the shortest convex combination of the two gradients (MGDA for two tasks)."""
    aa, bb, ab = dot(a, a), dot(b, b), dot(a, b)
    gap = aa - 2 * ab + bb
    return min(max((bb - ab) / gap, 0.0), 1.0) if gap > 0 else 0.5
