"""Steer: the flat-spectrum sum of all updates, its scale found on calibration data, each singular direction then given its gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergeway.linalg import thin_svd
from mergeway.objective import gradient_of
from mergeway.rules.fold import Fold, Params, Whole
from mergeway.rules.line_search import line_search
from mergeway.rules.options import check_range
from mergeway.rules.rule import Rule


@dataclass(frozen=True)
class Steer(Rule):
    """Ψ_k = ψ_0 + σ̄·U diag(c) Vᵀ for every matrix U Σ Vᵀ of S = k·Σ w_i δ_i / W_k, ψ_0 + c·S/k for other tensors; Ψ_1 = ψ_1.

    All gains c start at `shrink`·c*, c* = argmin L over one common gain: experts have seen data like the calibration samples,
    so the loss asks for more than generalises. `steps` of Adam on the gains, each `rate` long, follow; with fewer than 1024
    samples n they are n/1024 as long.
    """

    name = "steer"
    title = "flat-spectrum sum with calibrated gains"
    paper = "mergeway's own; grown from ODE-M and Iso-C"
    slots = ("sum",)
    needs = frozenset({"calibration"})
    whole = True
    matrices = True

    steps: int = 15
    rate: float = 0.1
    shrink: float = 0.78
    linear: str | None = None

    def __post_init__(self) -> None:
        check_range(self, "steps", 0, float("inf"))
        check_range(self, "rate", 0.0, float("inf"))
        check_range(self, "shrink", 0.0, float("inf"))

    def merge(self, at: Fold, base: Params, memory: dict[str, Params], arrival: Params, objective: Any) -> Whole:
        kept = self.remember(at, base, memory, arrival)
        if at.step == 1:
            return Whole(kept, arrival)
        total = kept["sum"]
        parts = {n: self._directions(n, s / at.mean_weight, at.step) for n, s in total.items() if bool(s.any())}
        best, looks = line_search(lambda c: float(objective(_assemble(base, parts, _common(parts, c)))))
        gains, losses = self._fit(base, parts, _common(parts, self.shrink * best), objective)
        facts = {"gradients": self.steps, "forwards": looks, "best": best, "scale": self.shrink * best}
        return Whole(kept, _assemble(base, parts, gains), facts, {"losses": losses})

    def remember(self, at: Fold, base: Params, memory: dict[str, Params], arrival: Params) -> dict[str, Params]:
        held = memory.get("sum") or {n: torch.zeros_like(b) for n, b in base.items()}
        return {"sum": {n: held[n] + at.weight * (arrival[n] - base[n]) for n in base}}

    def _directions(self, name: str, s: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
        """σ̄U and Vᵀ of a matrix; any other tensor is one direction, S/k."""
        if not self.sees_matrix(name, tuple(s.shape)):
            return s / k, None
        u, sigma, v = thin_svd(s.reshape(len(s), -1))
        return (u * sigma.mean()).to(s.dtype), v.mT.to(s.dtype)

    def _fit(self, base: Params, parts: dict, gains: Params, objective: Any) -> tuple[Params, list[float]]:
        samples = sum(len(t) for t in getattr(objective, "tasks", ())) or 1024
        free = {n: g.requires_grad_() for n, g in gains.items()}
        adam = torch.optim.Adam(free.values(), lr=self.rate * min(1.0, samples / 1024), eps=1e-12)
        losses = []
        for _ in range(self.steps):
            value, grads = gradient_of(objective, _assemble(base, parts, free), parts)
            losses.append(value)
            for name, (u, vt) in parts.items():
                g = grads[name]
                free[name].grad = (
                    (g * u).sum().reshape(1) if vt is None else ((u.mT @ g.reshape(len(g), -1)) * vt).sum(1)
                )
            adam.step()
        return {n: g.detach() for n, g in free.items()}, losses


def _common(parts: dict[str, tuple[Tensor, Tensor | None]], c: float) -> Params:
    """The same gain for every direction."""
    return {n: torch.full((1 if vt is None else len(vt),), c, dtype=u.dtype) for n, (u, vt) in parts.items()}


def _assemble(base: Params, parts: dict[str, tuple[Tensor, Tensor | None]], gains: Params) -> Params:
    out = dict(base)
    with torch.no_grad():
        for name, (u, vt) in parts.items():
            c = gains[name]
            out[name] = base[name] + (c * u if vt is None else ((u * c) @ vt).reshape(base[name].shape))
    return out
