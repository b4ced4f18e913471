"""The rectified velocity field: v = u⊥ + γ u∥ with u = (θ1 − θ)/(1 − t) (Eq. 10-14, ODE-M)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mergeway.errors import MergewayError
from mergeway.rules.ode.flat import FlatParams, Loss, gap_products, products
from mergeway.rules.ode.metric import Metric, apply_metric


@dataclass(frozen=True)
class Slope:
    """The field at one point: v = along·(θ1 − θ) + across·d, and what was seen there.

    `alignment` is ‖P_g u‖/‖u‖, the ratio that Theorem 3.3 bounds by ρ; `distance` is ‖θ1 − θ‖.
    """

    time: float
    loss: float
    gamma: float
    alignment: float
    distance: float
    along: float
    across: float

    @property
    def straight(self) -> bool:
        """Whether v is u itself: then the path is a straight line for as long as that lasts."""
        return self.across == 0.0


@dataclass
class Field:
    """The velocity field of one merge; every call of `slope` costs one gradient.

    ΔL = L(θ1) − L(θ0), with L(θ0) from the first evaluation. With `guidance` ρ the field also descends: v ← v − ρ‖u‖·d/‖d‖. The metric decides what d is
    and what "parallel" means: u∥ = ⟨u, g⟩/⟨d, g⟩·d, which is Eq. 11 for d = g.
    """

    flat: FlatParams
    loss: Loss
    loss_target: float
    guidance: float = 0.0
    metric: Metric = "euclidean"
    task_norm: float = 0.0
    rectify: bool = True
    evaluations: int = 0
    loss_start: float | None = None

    def slope(self, t: float) -> Slope:
        """Evaluate the field at the current θ; leaves d in the gradient buffer."""
        flat = self.flat
        value = self._gradient()
        self.evaluations += 1
        self.loss_start = value if self.loss_start is None else self.loss_start
        self.check_finite(value, t)
        r_g, r_r = gap_products(flat, flat.grad)
        g_g = products((flat.grad, flat.grad))[0]
        if not (math.isfinite(r_g) and math.isfinite(g_g)):
            raise MergewayError(
                f"the gradient of the objective is not finite at t = {t:g}, evaluation {self.evaluations}"
            )
        d_g = apply_metric(self.metric, flat)
        alpha = 1.0 / (1.0 - t)
        u_g = alpha * r_g
        gamma = damping(u_g, self.loss_target - self.loss_start) if self.rectify else 1.0
        # g = 0 leaves nothing to decompose: u∥ = 0 and v = u.
        across = -(1.0 - gamma) * u_g / d_g if d_g > 0 else 0.0
        if self.guidance and d_g > 0:
            length = math.sqrt(products((flat.grad, flat.grad))[0])
            across -= self.guidance * alpha * math.sqrt(r_r) / length
        norms = math.sqrt(r_r * g_g)
        return Slope(t, value, gamma, abs(r_g) / norms if norms > 0 else 0.0, math.sqrt(r_r), alpha, across)

    def measure(self, t: float) -> tuple[float, float]:
        """L(θ) and ‖θ1 − θ‖ without a gradient."""
        value = self.flat.value(self.loss)
        self.check_finite(value, t)
        return value, math.sqrt(gap_products(self.flat, self.flat.theta)[1])

    def check_finite(self, value: float, t: float) -> None:
        """Refuse to go on with a loss that is no number."""
        if not math.isfinite(value):
            raise MergewayError(
                f"the objective is {value} at t = {t:g}, evaluation {self.evaluations}; the calibration data or the arrival does not fit the model"
            )

    def _gradient(self) -> float:
        if self.metric == "diagonal" or self.task_norm:
            from mergeway.rules.ode.per_task import combined_gradient

            return combined_gradient(self.flat, self.loss, self.task_norm, diagonal=self.metric == "diagonal")
        return self.flat.gradient(self.loss)


def damping(u_g: float, gap: float) -> float:
    """γ: 1 while the motion does not raise the loss, else ΔL/⟨g, u⟩ clipped to [0, 1] (Eq. 13-14)."""
    if u_g <= 0:
        return 1.0
    return min(max(gap / u_g, 0.0), 1.0)
