"""Where `steer` starts, and what it falls back to: the flat spectrum or the mean of the updates, as the samples say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from mergeway.calibration.objective import Objective
from mergeway.rules.iso import length_without_data
from mergeway.rules.rule import Fold, Params
from mergeway.rules.steer.directions import Directions
from mergeway.rules.steer.looks import doubt_of, glance_at, is_clearly_lower
from mergeway.rules.steer.sums import Sums


class Start(NamedTuple):
    """The directions to start in, their best common gain, the loss there, and what was found on the way."""

    directions: Directions
    scale: float
    loss: float
    facts: dict[str, float]


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

    glance = glance_at(loss)
    is_flat = bool(flat.matrices) and not is_clearly_lower(glance(sums.mean()), glance(flattened()), doubt_of(loss))
    return Plain(flattened if is_flat else sums.mean, is_flat)


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
