"""Steer: the sum of all updates, flat or as it is, then taught by the arrivals themselves: their answers replace labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, Incoming, Merged, ModelRule, Params, SeesMatrices, WantsAnswers
from mergeway.rules.start import find_start, glance_at, size_of_update
from mergeway.rules.teach import Lesson, share_of_gradient


@dataclass(frozen=True)
class Steer(SeesMatrices, WantsAnswers, ModelRule):
    """Ψ_k = ψ_0 + R_{k−1} + U diag(c·ℓ) Vᵀ + D for every matrix U Σ Vᵀ of S = k·Σ w_i δ_i / W_k; Ψ_1 = ψ_1.

    ℓ is σ̄ for every direction (a flat spectrum) or σ/k (the mean of the updates), whichever starts at the lower loss. Other
    tensors have S/k for their one direction. The gains c start at c_0 = `shrink`·c*, c* = argmin L over one common gain, D at 0.
    Then come `steps` of Adam for each task, `most` in all, or the share L(start)/`far` of them where the start is near already,
    at least a quarter. A step sees `batch` samples and copies, and moves the gains at `rate`, D at `weight_rate` of the root mean
    square of an arrival's update. L is the mean over tasks of KL(arrival ‖ merged). What was taught is carried on:
    R_k = `carry`·(R_{k−1} + taught).

    A fifth of the samples is held back for the first half of the steps. A fold that is then better on it than the mean of the
    updates goes on with all samples, any other without it; one that ends worse as well deploys the mean and carries nothing.
    """

    name = "steer"
    title = "sum of the updates, taught by the arrivals' own answers"
    paper = "mergeway's own; grown from ODE-M and Iso-C"
    slots = ("sum", "carried")

    steps: int = 48
    most: int = 384
    batch: int = 64
    rate: float = 0.1
    weight_rate: float = 0.1
    shrink: float = 0.78
    carry: float = 0.8
    far: float = 0.2
    start: Literal["auto", "flat", "mean", "base"] = "auto"
    labels: bool = False
    linear: str | None = None

    def __post_init__(self) -> None:
        for option in ("steps", "most", "rate", "weight_rate", "shrink", "far"):
            check_range(self, option, 0.0, float("inf"))
        check_range(self, "batch", 1, float("inf"))
        check_range(self, "carry", 0.0, 1.0)

    @property
    def asks_arrivals(self) -> bool:
        return not self.labels

    def merge(self, at: Fold, given: Incoming) -> Merged:
        base, state, arrival = given.base, given.state, given.arrival
        carried = state.get("carried") or _zeros(base)
        facts = {"update": size_of_update(at, base, arrival)}

        def total() -> Params:  # worked out twice: it is not kept while the directions are found
            before = state.get("sum") or _zeros(base)
            return {n: before[n] + at.weight * (arrival[n] - b) for n, b in base.items()}

        if at.step == 1:
            return Merged({"sum": total(), "carried": carried}, arrival, facts)
        fit, judge = given.objective.split()
        found = find_start(self.start, self.sees_matrix, at, total(), base, carried, fit)
        scale, directions = self.shrink * found.scale, found.directions

        def start() -> Params:
            return directions.added({n: b + carried[n] for n, b in base.items()}, directions.gains(scale))

        steps = self._steps(at.step, found.loss)
        lesson = Lesson(start(), directions, steps, self.rate, self.weight_rate * facts["update"], given.progress)
        lesson.attend(fit, steps - steps // 2, self.batch)
        glance, summed = glance_at(judge), total()
        mean = {n: b + summed[n] / (at.step * at.mean_weight) for n, b in base.items()}
        before, after = glance(mean), glance(lesson.model)
        lesson.attend(given.objective if after <= before else fit, steps // 2, self.batch)
        after = after if after <= before else glance(lesson.model)
        gradients = len(lesson.losses) * share_of_gradient(self.batch, given.objective)
        facts |= found.facts | {"scale": scale, "steps": steps, "gradients": gradients}
        facts |= {"held_mean": before, "held_end": after, "fell_back": float(not after <= before)}
        if facts["fell_back"]:
            return Merged({"sum": summed, "carried": _zeros(base)}, mean, facts, {"losses": lesson.losses})
        end, began = lesson.end(), start()
        taught = {n: self.carry * (carried[n] + end[n] - began[n]) for n in base}
        return Merged({"sum": summed, "carried": taught}, end, facts, {"losses": lesson.losses})

    def _steps(self, k: int, loss: float) -> int:
        near = min(1.0, loss / self.far) if self.far else 1.0
        return round(min(self.steps * k, self.most) * max(0.25, near))


def _zeros(base: Params) -> Params:
    return {n: torch.zeros_like(b) for n, b in base.items()}
