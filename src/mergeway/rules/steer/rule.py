"""Steer: the sum of all updates, flat or as it is, then taught by the arrivals themselves: their answers replace labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mergeway.rules.options import check_range
from mergeway.rules.rule import ByRows, Fold, Incoming, Merged, ModelRule, Params, SeesMatrices, WantsAnswers
from mergeway.rules.steer.course import Course, share_of_gradient
from mergeway.rules.steer.looks import SURE, doubt_of, glance_at, is_clearly_lower, too_few
from mergeway.rules.steer.start import find_plain, find_start
from mergeway.rules.steer.sums import Sums, sizes_of_updates


@dataclass(frozen=True)
class Steer(SeesMatrices, WantsAnswers, ByRows, ModelRule):
    """Ψ_k = ψ_0 + R_{k−1} + U diag(c·ℓ) Vᵀ + D for every matrix U Σ Vᵀ of S = k·Σ w_i δ_i / W_k; Ψ_1 = ψ_1.

    ℓ is σ̄ for every direction (a flat spectrum) or σ/k (the mean of the updates), whichever starts at the lower loss. Other
    tensors have S/k for their one direction. The gains c start at c_0 = `shrink`·c*, c* = argmin L over one common gain, D at 0.
    Then come `steps` of Adam for each task, `most` in all, or the share L(start)/`far` of them where the start is near already,
    at least a quarter. A step sees `batch` samples and copies, and moves the gains at `rate`, D at `weight_rate` of the root mean
    square of an arrival's update. L is the mean over tasks of KL(arrival ‖ merged); a step has both at `temperature`. What was taught is
    carried on: R_k = `carry`·(R_{k−1} + taught).

    One sample in sixteen is never taught, in no fold: it judges. The lesson is kept, or half, .. or nothing of it where that is better by
    more than n samples can tell, one part in √n. If less than half is kept, it is taken again at a third and a ninth of the rates. If the
    best of it is not better than the plain merge, or a task has fewer than 8 samples, the plain merge is deployed; if it is worse by two
    parts in √n, nothing is carried. Plain is `iso` with `scaling=auto`, or the mean where it is better by one part in √n.
    `fall_back=false` deploys what was taught in any case, so that a control is what its name says.
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
    far: float = 0.12
    temperature: float = 3.0
    start: Literal["auto", "flat", "mean", "base"] = "auto"
    labels: bool = False
    fall_back: bool = True
    linear: str | None = None

    def __post_init__(self) -> None:
        for option in ("steps", "most", "rate", "weight_rate", "shrink", "far"):
            check_range(self, option, 0.0, float("inf"))
        check_range(self, "batch", 1, float("inf"))
        check_range(self, "temperature", 1.0, 100.0)
        check_range(self, "carry", 0.0, 1.0)

    @property
    def asks_arrivals(self) -> bool:
        return not self.labels

    def merge(self, at: Fold, given: Incoming) -> Merged:
        facts, sums = sizes_of_updates(at, given, self.sees_matrix), Sums(at, given)
        if at.step == 1:
            return Merged({"sum": dict(sums.total()), "carried": sums.zeros()}, {**given.arrival}, facts)
        flat = sums.directions(self.sees_matrix)
        plain = find_plain(flat, at, sums, facts["spread"], given.objective)
        facts["plain_flat"] = float(plain.is_flat)
        if (fewest := too_few(given.objective)) and self.fall_back:
            facts |= {"gradients": 0.0, "fell_back": 1.0, "too_few": float(fewest)}
            return Merged({"sum": dict(sums.total()), "carried": sums.untaught(self.carry)}, plain.model(), facts)
        fit, judge = given.objective.split()
        glance, doubt = glance_at(judge), doubt_of(given.objective)
        facts["held_plain"] = held_plain = glance(plain.model())
        found = find_start(self.start, flat, at, sums, fit)
        scale, directions = self.shrink * found.scale, found.directions

        def begin() -> Params:
            return directions.add_to(sums.ground(), directions.gains(scale))

        near = min(1.0, found.loss / self.far) if self.far else 1.0
        steps = round(min(self.steps * at.step, self.most) * max(0.25, near))
        rates = self.rate, self.weight_rate * facts["update"]
        course = Course(begin, directions, steps, self.batch, *rates, doubt, given.progress)
        slower = max(0, int(at.facts.get("slower", 0)) - 1)
        model, taught, lessons = course.teach(fit.softened(self.temperature), glance, slower)
        facts |= found.facts | {"scale": scale, "steps": steps, "kept": taught.kept, "slower": taught.slower}
        facts["gradients"] = lessons * steps * share_of_gradient(self.batch, given.objective)
        facts["held_end"] = taught.loss
        facts["fell_back"] = float(self.fall_back and not taught.loss < held_plain)
        # What is not better than the plain merge is not deployed, but unless it is clearly worse the next arrival may build on it.
        facts["forgot"] = float(self.fall_back and is_clearly_lower(held_plain, taught.loss, SURE * doubt))
        learned = sums.zeros() if facts["forgot"] else sums.carried_on(self.carry, begin(), model)
        if facts["fell_back"]:
            del model  # before the other one takes its room
            model = plain.model()
        return Merged({"sum": dict(sums.total()), "carried": learned}, model, facts, {"losses": taught.losses})
