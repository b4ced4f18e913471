"""DOP: dual orthogonal projections, a data-free optimisation of each linear weight between the merged and the new model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mergeway.linalg import dot, squared_norm, thin_svd
from mergeway.params import Part
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, Memory, Rule

ENERGY = 0.99999  # share of Σσ whose singular vectors are kept
EMA = 0.999  # how slowly the loss weights follow the min-norm solution


@dataclass(frozen=True)
class Dop(Rule):
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
    matrices = True

    steps: int = 200
    lr: float = 1e-4
    alpha: float = 0.8
    linear: str | None = None

    def __post_init__(self) -> None:
        check_range(self, "steps", 0, float("inf"))
        check_range(self, "lr", 0.0, float("inf"))
        check_range(self, "alpha", 0.0, 1.0)

    def fold(self, at: Fold, part: Part, delta: Tensor, memory: Memory) -> Memory:
        if at.step == 1:
            return {"update": delta}
        merged = memory["update"]
        share = at.relative_weight / (1 + at.relative_weight)
        start = torch.lerp(merged, delta, share)
        if part.matrix is None:
            return {"update": start}
        old, new = self.alpha * (1 - share), (1 - self.alpha) * share
        return {"update": self._optimise(start, (merged, delta), old / (old + new))}

    def update(self, at: Fold, part: Part, memory: Memory) -> Tensor:
        return memory["update"]

    def _optimise(self, start: Tensor, targets: tuple[Tensor, Tensor], weight: float) -> Tensor:
        """Adam on the weighted losses; `weight` is that of the merged model."""
        sides = [_scaled_bases(target) for target in targets]
        w = start.clone().requires_grad_()
        adam = torch.optim.Adam([w], lr=self.lr)
        for _ in range(self.steps):
            losses, grads = zip(
                *(_loss_and_grad(w.detach(), t, *s) for t, s in zip(targets, sides, strict=True)), strict=True
            )
            if min(losses) > 0:
                weight = EMA * weight + (1 - EMA) * _min_norm(grads[0] / losses[0], grads[1] / losses[1])
            w.grad = weight * grads[0] + (1 - weight) * grads[1]
            adam.step()
        return w.detach()


def _scaled_bases(update: Tensor) -> tuple[Tensor, Tensor]:
    """U Σ and V Σ of an update, cut at ENERGY of its singular values."""
    u, sigma, v = thin_svd(update)
    r = int((sigma.cumsum(0) < ENERGY * sigma.sum()).sum())
    return (u[:, :r] * sigma[:r]).to(update.dtype), (v[:, :r] * sigma[:r]).to(update.dtype)


def _loss_and_grad(w: Tensor, target: Tensor, us: Tensor, vs: Tensor) -> tuple[float, Tensor]:
    d = w - target
    left, right = us.mT @ d, d @ vs
    return squared_norm(left) + squared_norm(right), 2 * (us @ left + right @ vs.mT)


def _min_norm(a: Tensor, b: Tensor) -> float:
    """The weight of `a` in the shortest convex combination of the two gradients (MGDA for two tasks)."""
    gap = squared_norm(a - b)
    return min(max(dot(b - a, b) / gap, 0.0), 1.0) if gap > 0 else 0.5
