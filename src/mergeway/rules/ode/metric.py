"""What "parallel to the gradient" means: the direction d into which a metric turns the gradient g."""

from __future__ import annotations

import math
from typing import Literal

from mergeway.rules.ode.flat import FlatParams, chunks

Metric = Literal["euclidean", "layer", "diagonal"]

FLOOR = 0.1  # ε of the diagonal metric against √mean(s): entries that hardly any task uses must not dominate


def apply_metric(metric: Metric, flat: FlatParams) -> float:
    """Turn g into d in place and return ⟨d, g⟩.

    `euclidean`: d = g. `layer`: each tensor's gradient scaled to that tensor's ‖θ1 − θ‖. `diagonal`: d = g/(√s + ε) with s
    the mean square of the tasks' gradients, which the gradient pass has left in `moments`.
    """
    if metric == "layer":
        return _scale_to_layers(flat)
    if metric == "diagonal":
        return _divide_by_moments(flat)
    return flat.square(flat.grad)


def _scale_to_layers(flat: FlatParams) -> float:
    d_g = 0.0
    for span in flat.spans.values():
        g = flat.grad[span]
        away = flat.target[span].double() - flat.theta[span].double()
        squares = [float(g.double().square().sum()), float(away.square().sum())]
        length, gap = (math.sqrt(square) for square in flat.team.add_up(squares))
        if length > 0:
            g.mul_(gap / length)
            d_g += gap * length
    return d_g


def _divide_by_moments(flat: FlatParams) -> float:
    s = flat.moments
    total, count = flat.team.add_up([float(s.double().sum()), float(s.numel())])
    mean = total / count if count else 0.0
    if mean == 0.0:
        return flat.square(flat.grad)
    s.sqrt_().add_(FLOOR * math.sqrt(mean))
    d_g = 0.0
    for part in chunks(s):
        g = flat.grad[part].double()
        d_g += float((g / s[part]) @ g)
    flat.grad.div_(s)
    return flat.team.add_up([d_g])[0]
