"""OPCM: project the incoming update away from what is merged, add it, rescale (Algorithm 1, Eq. 6-10, OPCM)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from torch import Tensor

from mergeway.core.linalg import precision, product, right_basis, squared_norm
from mergeway.core.tensors import Part
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, PartRule, SeesMatrices, Settles, State


@dataclass(frozen=True)
class Opcm(SeesMatrices, Settles, PartRule):
    """Ψ_k = ψ_0 + S_k/λ_k with S_k = S_{k−1} + P(δ_k; S_{k−1}) and λ_k = ‖S_k‖ / mean ‖δ_i‖ (Eq. 7, 10).

    Utilities (Eq. 57-58, ODE-M): S sums w_i δ̂_i and is divided by the mean weight. The projection does not depend on the
    scale of S, so the recursion is that of the paper.

    Deviates: as in the authors' code, P also keeps the blocks between the leading and the remaining singular vectors, and
    the rank r is the largest whose singular values sum to at most alpha of the total (Eq. 9 reads one more).
    `norms=projected` follows line 13 of Algorithm 1 instead of Eq. 10. Singular values below 1e-6 of the largest count as
    zero. An arrival equal to the base changes only the mean norm; a zero S gives a zero update.
    """

    name = "opcm"
    title = "orthogonal projection with adaptive scaling"
    paper = "OPCM Algorithm 1; ODE-M Eq. 57-58"

    alpha: float = 0.5
    norms: Literal["raw", "projected"] = "raw"
    scale: Literal["adaptive", "sqrt"] = "adaptive"
    linear: str | None = None

    def __post_init__(self) -> None:
        check_range(self, "alpha", 0.0, 1.0)

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        merged = state["sum"]
        if part.matrix is not None:
            delta = project(delta, merged, self.alpha)
        return {"sum": merged.add(delta, alpha=at.weight)}

    def tally(self, at: Fold, part: Part, base: Tensor, delta: Tensor, before: State, after: State) -> dict[str, float]:
        counted = delta if self.norms == "raw" else (after["sum"] - before["sum"]) / at.weight
        return {"incoming": squared_norm(counted), "merged": squared_norm(after["sum"])}

    def settle(self, at: Fold, sums: Mapping[str, float]) -> dict[str, float]:
        k = at.step
        n = (k - 1) / k * at.facts.get("norm", 0.0) + sqrt(sums["incoming"]) / k
        length = sqrt(sums["merged"]) / at.mean_weight
        lam = sqrt(k) if self.scale == "sqrt" else length / n if length > 0 and n > 0 else 1.0
        return {"norm": n, "lambda": lam}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        return state["sum"] / (at.mean_weight * at.facts["lambda"])


def project(delta: Tensor, merged: Tensor, alpha: float) -> Tensor:
    """P(ΔW) = ΔW − U K Vᵀ, K = diag(C) with the top-left r×r block of C = Uᵀ ΔW V: Eq. 9 without the full bases.

    U = S V Σ⁻¹ is never formed: C = Σ⁻¹ Vᵀ(Sᵀ ΔW V), read from whichever side costs less.
    """
    m, n = delta.shape
    if m < n:
        return project(delta.mT, merged.mT, alpha).mT
    if not bool(merged.any()):
        return delta
    sigma, v = right_basis(merged)
    reached = sigma.cumsum(0)
    r = int((reached <= alpha * reached[-1]).sum())
    dtype = precision(sigma, delta.dtype)
    # `merged` may be mapped from a file, and `delta` be a view.
    s, d, v, weight = merged.to(dtype, copy=True), delta.to(dtype), v.to(dtype), sigma.pow(-2).to(dtype)
    narrow = m >= 2 * n
    left, right = (v, product(product(s.mT, d), v)) if narrow else (product(s, v), product(d, v))  # C Σ = leftᵀ right
    removed = left * ((left * right).sum(0) * weight)
    lead, along = left[:, :r].contiguous(), right[:, :r].contiguous()
    removed[:, :r] = product(lead, product(lead.mT, along) * weight[:r, None])
    removed = product(removed, v.mT)
    return (d - (product(s, removed) if narrow else removed)).to(delta.dtype)
