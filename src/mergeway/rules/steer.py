"""Steer: the flat-spectrum sum of all updates, then taught by the arrivals themselves: their answers replace labels."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch

from mergeway.calibration.objective import Objective
from mergeway.core.ranks import ALONE, Team
from mergeway.rules.directions import Directions
from mergeway.rules.line_search import line_search
from mergeway.rules.options import check_range
from mergeway.rules.rule import Fold, Merged, ModelRule, Params, SeesMatrices, WantsAnswers
from mergeway.rules.teach import teach


@dataclass(frozen=True)
class Steer(SeesMatrices, WantsAnswers, ModelRule):
    """Ψ_k = ψ_0 + R_{k−1} + σ̄·U diag(c) Vᵀ + D for every matrix U Σ Vᵀ of S = k·Σ w_i δ_i / W_k; Ψ_1 = ψ_1.

    Other tensors have S/k for their one direction. The gains c start at c_0 = `shrink`·c*, c* = argmin L over one common gain,
    D at 0. Then come `steps` of Adam for each task, `most` in all, on batches of `batch` samples and copies: the gains at `rate`,
    D at `weight_rate` of the root mean square of an arrival's update. L is the mean over tasks of KL(arrival ‖ merged). What
    was taught is carried on: R_k = `carry`·(R_{k−1} + taught).

    A fifth of the samples is held back. A fold that ends worse on it than it began keeps its start and carries nothing more.
    """

    name = "steer"
    title = "flat-spectrum sum, taught by the arrivals' own answers"
    paper = "mergeway's own; grown from ODE-M and Iso-C"
    slots = ("sum", "carried")

    steps: int = 48
    most: int = 384
    batch: int = 64
    rate: float = 0.1
    weight_rate: float = 0.1
    shrink: float = 0.78
    carry: float = 0.8
    linear: str | None = None

    def __post_init__(self) -> None:
        for option in ("steps", "most", "rate", "weight_rate", "shrink"):
            check_range(self, option, 0.0, float("inf"))
        check_range(self, "batch", 1, float("inf"))
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
        zeros = {n: torch.zeros_like(b) for n, b in base.items()}
        total = {n: state.get("sum", zeros)[n] + at.weight * (arrival[n] - b) for n, b in base.items()}
        carried = state.get("carried", zeros)
        size = _running_mean(at.facts.get("update", 0.0), _root_mean_square(base, arrival), at.step)
        if at.step == 1:
            return Merged({"sum": total, "carried": carried}, arrival, {"update": size})
        fit, judge = objective.split()
        flat = Directions.of_sum({n: s / at.mean_weight for n, s in total.items()}, at.step, self.sees_matrix)
        ground = {n: b + carried[n] for n, b in base.items()}
        best, looks = line_search(lambda c: float(fit(flat.added(ground, flat.gains(c)))))
        start = flat.added(ground, flat.gains(self.shrink * best))
        steps = min(self.steps * at.step, self.most)
        end, losses = teach(start, flat, fit, steps, self.batch, self.rate, self.weight_rate * size)
        with torch.no_grad():
            before, after = float(judge(start)), float(judge(end))
        if not after <= before:
            end = start
        taught = {n: carried[n] + (end[n] - start[n]) for n in base}
        facts = {"update": size, "steps": steps, "gradients": steps * self._share(objective)}
        facts |= {"forwards": looks, "best": best, "scale": self.shrink * best}
        facts |= {"held_start": before, "held_end": after, "fell_back": float(not after <= before)}
        kept = {"sum": total, "carried": {n: self.carry * t for n, t in taught.items()}}
        return Merged(kept, end, facts, {"losses": losses})

    def _share(self, objective: Objective) -> float:
        """What a batch costs against one gradient over all samples; a function of your own is all there is."""
        samples = sum(len(task) for task in objective.tasks)
        return self.batch / samples if samples else 1.0


def _root_mean_square(base: Params, arrival: Params) -> float:
    """Of the entries that the arrival moved."""
    moved = [(arrival[n] - b).double() for n, b in base.items()]
    count = sum(int(m.count_nonzero()) for m in moved)
    return sqrt(sum(float(m.square().sum()) for m in moved) / count) if count else 0.0


def _running_mean(before: float, new: float, k: int) -> float:
    return before + (new - before) / k
