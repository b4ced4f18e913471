"""What "parallel to the gradient" means: the direction d that a metric makes of the gradient g."""

from __future__ import annotations

import math
from typing import Literal

from mergeway.ode.flat import FlatParams, products

Metric = Literal["euclidean", "layer", "diagonal"]


def apply_metric(metric: Metric, flat: FlatParams) -> float:
    """Turn g into d in place and return ⟨d, g⟩.

    `euclidean`: d = g. `layer`: each tensor's gradient scaled to that tensor's ‖θ1 − θ‖. `diagonal`: d = g/(√s + ε) with s
    the mean square of the tasks' gradients, which the gradient pass has left in `moments`.
    """
    if metric == "layer":
        return _scale_to_layers(flat)
    if metric == "diagonal":
        return _divide_by_moments(flat)
    return products((flat.grad, flat.grad))[0]


def _scale_to_layers(flat: FlatParams) -> float:
    total = 0.0
    for span in flat.spans.values():
        g = flat.grad[span]
        length = float(g.double().norm())
        gap = float((flat.target[span].double() - flat.theta[span].double()).norm())
        if length > 0:
            g.mul_(gap / length)
            total += gap * length
    return total


def _divide_by_moments(flat: FlatParams) -> float:
    s = flat.moments
    mean = float(s.double().mean()) if s.numel() else 0.0
    if mean == 0.0:
        return products((flat.grad, flat.grad))[0]
    # The floor keeps entries that hardly any task uses from dominating.
    s.sqrt_().add_(0.1 * math.sqrt(mean))
    d_g = 0.0
    for i in range(0, s.numel(), 1 << 20):
        part = slice(i, i + (1 << 20))
        g = flat.grad[part].double()
        d_g += float((g / s[part]) @ g)
    flat.grad.div_(s)
    return d_g
