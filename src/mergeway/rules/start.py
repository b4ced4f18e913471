"""Where `steer` starts, and what it falls back to: the flat spectrum or the mean of the updates, whichever has the lower loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.core.linalg import squared_norm
from mergeway.rules.directions import Directions
from mergeway.rules.iso import length_without_data
from mergeway.rules.rule import Fold, Incoming, Params

ENOUGH = 8  # samples of a task that can tell whether another rate would be better
GLANCE = 256  # samples and copies on which a model is looked at without being taught


class Start(NamedTuple):
    """The directions to start in, their best common gain, the loss there, and what was found on the way."""

    directions: Directions
    scale: float
    loss: float
    facts: dict[str, float]


@dataclass(frozen=True)
class Sums:
    """What a fold adds up. It is read and added anew each time: what is not kept takes no memory while the model is taught."""

    at: Fold
    given: Incoming

    def total(self) -> Iterator[tuple[str, Tensor]]:
        """Σ w_i δ_i, the new arrival among them."""
        before = self.given.state.get("sum")
        for n, b in self.given.base.items():
            delta = self.at.weight * (self.given.arrival[n] - b)
            yield n, delta if before is None else before[n] + delta

    def mean(self) -> Params:
        """The base with the mean of the updates."""
        return {n: self.given.base[n] + s / (self.at.step * self.at.mean_weight) for n, s in self.total()}

    def ground(self) -> Params:
        """The base with what is carried on from earlier folds."""
        carried = self.given.state["carried"]
        return {n: b + carried[n] for n, b in self.given.base.items()}

    def zeros(self) -> Params:
        return {n: torch.zeros_like(b) for n, b in self.given.base.items()}

    def directions(self, sees_matrix: Callable[[str, tuple[int, ...]], bool]) -> Directions:
        """Those of S = k·Σ w_i δ_i / W_k, under a flat spectrum."""
        return Directions.of_sum(((n, s / self.at.mean_weight) for n, s in self.total()), self.at.step, sees_matrix)

    def squares(self, matrices: Collection[str]) -> tuple[float, float]:
        """‖ψ_0‖² and ‖Σ w_i δ_i‖² over these tensors."""
        base = math.fsum(squared_norm(self.given.base[n]) for n in matrices)
        return base, math.fsum(squared_norm(s) for n, s in self.total() if n in matrices)


def glance_at(loss: Objective) -> Callable[[Params], float]:
    """The loss on one batch of samples and copies, always the same one, without gradients."""
    rows = next(iter(loss.batches(1, GLANCE)))

    def glance(params: Params) -> float:
        with torch.no_grad():
            return loss.accumulate_batch(params, rows)

    return glance


def looks_at(loss: Objective) -> list[Callable[[Params], float]]:
    """The loss of the task that came last, and that of all; a function of your own knows no tasks, and is looked at whole.

    None where the newest task has too few samples to tell anything: then the others, which have been taught before, would decide.
    """
    if loss.tasks and len(loss.tasks[-1]) < ENOUGH:
        return []

    def newest(params: Params) -> float:
        with torch.no_grad():
            return loss.accumulate_task(params, loss.tasks[-1])

    return [*([newest] if loss.tasks else []), glance_at(loss)]


class Plain(NamedTuple):
    """What the updates give without teaching: their mean, or their flat sum at the length that `iso` would choose."""

    model: Callable[[], Params]
    is_flat: bool


def find_plain(flat: Directions, at: Fold, sums: Sums, spread: float, loss: Objective) -> Plain:
    """The flat sum, unless samples tell that the mean is better. Neither was fitted, so every sample may judge."""
    base, total = sums.squares(flat.matrices)
    lengths = flat.gains(length_without_data(at.step, base, total, spread)) if spread else {}
    gains = {n: c if n in flat.matrices else torch.ones_like(c) for n, c in lengths.items()}

    def flattened() -> Params:
        return flat.added({**sums.given.base}, gains)

    glance, samples = glance_at(loss), sum(len(task) for task in loss.tasks)
    is_flat = bool(flat.matrices) and takes_flat(glance(flattened()), glance(sums.mean()), samples)
    return Plain(flattened if is_flat else sums.mean, is_flat)


def takes_flat(flat: float, mean: float, samples: int) -> bool:
    """Whether the loss of the mean is no lower than by the one part in √n that n samples cannot tell; a function can tell all."""
    return flat <= mean * (1 + (1 / math.sqrt(samples) if samples else 0.0))


def find_start(which: str, flat: Directions, at: Fold, sums: Sums, loss: Objective) -> Start:
    """The start with the lower loss, or the one that was asked for; `base` has no length at all.

    A search begins where that of the fold before ended, and both take no gradient.
    """
    ground = sums.ground()
    kinds = {"flat": flat, "mean": flat.of_mean()}
    glance = glance_at(loss)
    if which == "base":
        return Start(flat, 0.0, glance(ground), {"forwards": 1})
    facts: dict[str, float] = {"forwards": 0}
    lowest: dict[str, float] = {}
    for kind in kinds if which == "auto" else [which]:

        def along(c: float, directions: Directions = kinds[kind]) -> float:
            return glance(directions.added(ground, directions.gains(c)))

        best = line_search(along, at.facts.get(kind, 1.0))
        lowest[kind] = best.loss
        facts |= {kind: best.scale, f"loss_{kind}": best.loss, "forwards": facts["forwards"] + best.looks}
    chosen = min(lowest, key=lambda kind: lowest[kind])
    return Start(kinds[chosen], facts[chosen], lowest[chosen], {**facts, "from_mean": float(chosen == "mean")})


def sizes_of_updates(
    at: Fold, given: Incoming, sees_matrix: Callable[[str, tuple[int, ...]], bool]
) -> dict[str, float]:
    """`update`: the mean over the arrivals so far of the root mean square of what each one moved. `spread`: Σ w_i‖δ_i‖², linear weights."""
    squares, spread, count = list[float](), list[float](), 0
    for n, b in given.base.items():
        moved = (given.arrival[n] - b).double()
        squares.append(squared_norm(moved))
        spread.extend(squares[-1:] if sees_matrix(n, tuple(b.shape)) else [])
        count += int(moved.count_nonzero())
    new = math.sqrt(math.fsum(squares) / count) if count else 0.0
    before = at.facts.get("update", 0.0)
    return {
        "update": before + (new - before) / at.step,
        "spread": at.facts.get("spread", 0.0) + at.weight * math.fsum(spread),
    }


class Lowest(NamedTuple):
    """Where a loss is lowest, how low it was on the grid, and how many looks that took."""

    scale: float
    loss: float
    looks: int


def line_search(loss: Callable[[float], float], around: float = 1.0, ratio: float = 1.6, most: int = 8) -> Lowest:
    """The minimum over c > 0 on the grid around·ratio^j, walked downhill from j = 0 and refined by a parabola in log c."""
    seen: dict[int, float] = {}

    def at(j: int) -> float:
        if j not in seen:
            value = loss(around * ratio**j)
            seen[j] = value if math.isfinite(value) else math.inf
        return seen[j]

    j, step = 0, 1 if at(1) < at(0) else -1
    # From where the loss is not finite there is no downhill but toward the base.
    while len(seen) < most and (at(j + step) < at(j) or math.isinf(at(j))):
        j += step
    left, here, right = (seen.get(j + i, math.inf) for i in (-1, 0, 1))
    bend = left - 2 * here + right
    shift = min(max(0.5 * (left - right) / bend, -0.5), 0.5) if math.isfinite(bend) and bend > 0 else 0.0
    return Lowest(around * ratio ** (j + shift), here, len(seen))
