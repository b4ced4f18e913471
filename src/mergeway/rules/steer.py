"""Steer: the flat-spectrum sum of all updates, its scale found on calibration data, each singular direction then given its gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergeway.calibration.objective import Objective, gradient_of
from mergeway.core.linalg import thin_svd
from mergeway.core.ranks import ALONE, Team
from mergeway.rules.line_search import line_search
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, Merged, ModelRule, Params, SeesMatrices, WantsSamples


@dataclass(frozen=True)
class Steer(SeesMatrices, WantsSamples, ModelRule):
    """Ψ_k = ψ_0 + R_{k-1} + σ̄·U diag(c) Vᵀ for every matrix U Σ Vᵀ of S = k·Σ w_i δ_i / W_k; Ψ_1 = ψ_1.

    Other tensors have S/k for their one direction. All gains c start at c_0 = `shrink`·c*, c* = argmin L over one common gain:
    experts have seen data like the calibration samples, so the loss asks for more than generalises. `steps` of Adam on the
    gains, each `rate` long, follow; with fewer than 1024 samples n they are n/1024 as long. What they taught is carried on:
    R_k = `carry`·(R_{k-1} + σ̄·U diag(c - c_0) Vᵀ), R_1 = 0.
    """

    name = "steer"
    title = "flat-spectrum sum with calibrated gains"
    paper = "mergeway's own; grown from ODE-M and Iso-C"
    slots = ("sum", "carried")

    steps: int = 15
    rate: float = 0.1
    shrink: float = 0.78
    carry: float = 0.5
    linear: str | None = None

    def __post_init__(self) -> None:
        check_range(self, "steps", 0, float("inf"))
        check_range(self, "rate", 0.0, float("inf"))
        check_range(self, "shrink", 0.0, float("inf"))
        check_range(self, "carry", 0.0, 1.0)

    def merge(
        self,
        at: Fold,
        base: Params,
        state: dict[str, Params],
        arrival: Params,
        objective: Objective,
        team: Team = ALONE,
    ) -> Merged:
        kept = self._added(at, base, state, arrival)
        if at.step == 1:
            return Merged(kept, arrival)
        carried = kept["carried"]
        parts = {n: self._directions(n, s / at.mean_weight, at.step) for n, s in kept["sum"].items() if bool(s.any())}
        ground = {n: b + carried[n] if n in parts else b for n, b in base.items()}
        best, looks = line_search(lambda c: float(objective(_assemble(ground, parts, _common(parts, c)))))
        start = _common(parts, self.shrink * best)
        gains, losses = self._fit(ground, parts, {n: g.clone() for n, g in start.items()}, objective)
        facts = {"gradients": self.steps, "forwards": looks, "best": best, "scale": self.shrink * best}
        taught = _assemble(carried, parts, {n: gains[n] - start[n] for n in parts})
        kept["carried"] = {n: self.carry * t for n, t in taught.items()}
        return Merged(kept, _assemble(ground, parts, gains), facts, {"losses": losses})

    def _added(self, at: Fold, base: Params, state: dict[str, Params], arrival: Params) -> dict[str, Params]:
        """The state with the arrival in the sum."""
        held, carried = (state.get(slot) or {n: torch.zeros_like(b) for n, b in base.items()} for slot in self.slots)
        return {"sum": {n: held[n] + at.weight * (arrival[n] - base[n]) for n in base}, "carried": carried}

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
