"""Steer: the sum of all updates, flat or as it is, then taught by the arrivals themselves: their answers replace labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mergeway.calibration.objective import Objective
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, Incoming, Merged, ModelRule, Params, SeesMatrices, WantsAnswers
from mergeway.rules.start import find_start, size_of_update
from mergeway.rules.teach import teach


@dataclass(frozen=True)
class Steer(SeesMatrices, WantsAnswers, ModelRule):
    """Ψ_k = ψ_0 + R_{k−1} + U diag(c·ℓ) Vᵀ + D for every matrix U Σ Vᵀ of S = k·Σ w_i δ_i / W_k; Ψ_1 = ψ_1.

    ℓ is σ̄ for every direction (a flat spectrum) or σ/k (the mean of the updates), whichever starts at the lower loss. Other
    tensors have S/k for their one direction. The gains c start at c_0 = `shrink`·c*, c* = argmin L over one common gain, D at 0.
    Then come `steps` of Adam for each task, `most` in all, on batches of `batch` samples and copies: the gains at `rate`, D at
    `weight_rate` of the root mean square of an arrival's update. L is the mean over tasks of KL(arrival ‖ merged). What was
    taught is carried on: R_k = `carry`·(R_{k−1} + taught).

    A fifth of the samples is held back. A fold that ends worse on it than it began keeps its start and carries nothing more.
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
    start: Literal["auto", "flat", "mean", "base"] = "auto"
    labels: bool = False
    linear: str | None = None

    def __post_init__(self) -> None:
        for option in ("steps", "most", "rate", "weight_rate", "shrink"):
            check_range(self, option, 0.0, float("inf"))
        check_range(self, "batch", 1, float("inf"))
        check_range(self, "carry", 0.0, 1.0)

    @property
    def asks_arrivals(self) -> bool:
        return not self.labels

    def merge(self, at: Fold, given: Incoming) -> Merged:
        base, state, arrival = given.base, given.state, given.arrival
        carried = state.get("carried") or {n: torch.zeros_like(b) for n, b in base.items()}
        facts = {"update": size_of_update(at, base, arrival)}

        def total() -> Params:  # worked out twice, because the model is taught while it would be kept
            before = state.get("sum") or {n: torch.zeros_like(b) for n, b in base.items()}
            return {n: before[n] + at.weight * (arrival[n] - b) for n, b in base.items()}

        if at.step == 1:
            return Merged({"sum": total(), "carried": carried}, arrival, facts)
        fit, judge = given.objective.split()
        found = find_start(self.start, self.sees_matrix, at, total(), base, carried, fit)
        scale, directions = self.shrink * found.scale, found.directions

        def start() -> Params:
            return directions.added({n: b + carried[n] for n, b in base.items()}, directions.gains(scale))

        steps = min(self.steps * at.step, self.most)
        end, losses = teach(start(), directions, fit, steps, self.batch, self.rate, self.weight_rate * facts["update"])
        began = start()
        with torch.no_grad():
            before, after = float(judge(began)), float(judge(end))
        fell_back = not after <= before
        if fell_back:
            end = began
        facts |= found.facts | {
            "scale": scale,
            "steps": steps,
            "gradients": steps * _share(self.batch, given.objective),
        }
        facts |= {"held_start": before, "held_end": after, "fell_back": float(fell_back)}
        taught = {n: self.carry * (carried[n] + end[n] - began[n]) for n in base}
        return Merged({"sum": total(), "carried": taught}, end, facts, {"losses": losses})


def _share(batch: int, objective: Objective) -> float:
    """What a batch costs against one gradient over all samples; a function of your own is all there is."""
    samples = sum(len(task) for task in objective.tasks)
    return batch / samples if samples else 1.0
