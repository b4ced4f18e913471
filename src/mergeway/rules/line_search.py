"""The best common scale of an update, found in a few looks at the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch


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
            with torch.no_grad():
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
