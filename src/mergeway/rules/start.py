"""Where `steer` starts: the flat spectrum or the mean of the updates, whichever has the lower loss at its best length."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

from mergeway.calibration.objective import Objective
from mergeway.rules.directions import Directions
from mergeway.rules.line_search import line_search
from mergeway.rules.rule import Fold, Params


class Start(NamedTuple):
    """The directions to start in, their best common gain, and what was found on the way."""

    directions: Directions
    scale: float
    facts: dict[str, float]


def find_start(
    which: str,
    sees_matrix: Callable[[str, tuple[int, ...]], bool],
    at: Fold,
    total: Params,
    ground: Params,
    loss: Objective,
) -> Start:
    """The start with the lower loss, or the one that was asked for; `base` has no length at all.

    A search begins where that of the fold before ended, and both take no gradient.
    """
    flat = Directions.of_sum({n: s / at.mean_weight for n, s in total.items()}, at.step, sees_matrix)
    kinds = {"flat": flat, "mean": flat.of_mean()}
    if which == "base":
        return Start(flat, 0.0, {"forwards": 0})
    facts: dict[str, float] = {"forwards": 0}
    lowest: dict[str, float] = {}
    for kind in kinds if which == "auto" else [which]:

        def along(c: float, directions: Directions = kinds[kind]) -> float:
            return float(loss(directions.added(ground, directions.gains(c))))

        best = line_search(along, at.facts.get(kind, 1.0))
        lowest[kind] = best.loss
        facts |= {kind: best.scale, f"loss_{kind}": best.loss, "forwards": facts["forwards"] + best.looks}
    chosen = min(lowest, key=lambda kind: lowest[kind])
    return Start(kinds[chosen], facts[chosen], {**facts, "from_mean": float(chosen == "mean")})


def size_of_update(at: Fold, base: Params, arrival: Params) -> float:
    """The mean over the arrivals so far of the root mean square of the entries that each one moved."""
    moved = [(arrival[n] - b).double() for n, b in base.items()]
    count = sum(int(m.count_nonzero()) for m in moved)
    new = sqrt(sum(float(m.square().sum()) for m in moved) / count) if count else 0.0
    before = at.facts.get("update", 0.0)
    return before + (new - before) / at.step
