"""The rectified velocity field: v = u⊥ + γ u∥ with u = (θ1 − θ)/(1 − t) (Eq. 10-14, ODE-M)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.errors import MergewayError
from mergeway.rules.ode.flat import FlatParams
from mergeway.rules.ode.metric import Metric, apply_metric
from mergeway.rules.ode.task_gradients import combined_gradient

ROUNDING = 1e-6  # of a float32 loss: how far above the envelope still counts as on it


@dataclass(frozen=True)
class Combination:
    """a·u + b·u∥: a vector by its two coefficients, so that no vector is stored."""

    u: float
    parallel: float

    def __add__(self, other: Combination) -> Combination:
        return Combination(self.u + other.u, self.parallel + other.parallel)

    def __sub__(self, other: Combination) -> Combination:
        return Combination(self.u - other.u, self.parallel - other.parallel)

    def __rmul__(self, factor: float) -> Combination:
        return Combination(factor * self.u, factor * self.parallel)


u = Combination(1.0, 0.0)
u_parallel = Combination(0.0, 1.0)  # P_g(u) = ⟨u, g⟩/‖g‖²·g (Eq. 11)
u_perpendicular = u - u_parallel  # (I − P_g)u (Eq. 11)


def rectified(gamma: float) -> Combination:
    """v = u⊥ + γ u∥ (Eq. 12)."""
    return u_perpendicular + gamma * u_parallel


def scheduler(t: float) -> float:
    """α(t) = 1/(1 − t): the straight path then has constant velocity (Eq. 10)."""
    return 1.0 / (1.0 - t)


def damping(u_g: float, gap: float) -> float:
    """γ: 1 while the motion does not raise the loss, else ΔL/⟨g, u⟩ clipped to [0, 1] (Eq. 13-14)."""
    if u_g <= 0:
        return 1.0
    return min(max(gap / u_g, 0.0), 1.0)


def within_envelope(t: float, loss: float, loss_start: float, gap: float) -> bool:
    """L(θ(t)) ≤ L(θ0) + t·max(ΔL, 0) (Eq. 16), with room for the rounding of a float32 loss."""
    return loss <= loss_start + t * max(gap, 0.0) + ROUNDING * max(1.0, abs(loss_start))


@dataclass(frozen=True)
class Slope:
    """The field at one point: v = to_target·(θ1 − θ) + to_gradient·d, and what was seen there.

    `alignment` is ‖P_g u‖/‖u‖, the ratio that Theorem 3.3 bounds by ρ; `distance` is ‖θ1 − θ‖.
    """

    time: float
    loss: float
    gamma: float
    alignment: float
    distance: float
    to_target: float = 0.0
    to_gradient: float = 0.0

    @property
    def straight(self) -> bool:
        """Whether v is u itself: then the path is a straight line for as long as that lasts."""
        return self.to_gradient == 0.0


@dataclass
class Field:
    """The velocity field of one merge; every call of `slope` costs one gradient, every probe one loss.

    ΔL = L(θ1) − L(θ0), with L(θ0) from the first look. With `guidance` ρ the field also descends: v ← v − ρ‖u‖·d/‖d‖. The
    metric decides what d is and what "parallel" means: u∥ = ⟨u, g⟩/⟨d, g⟩·d, which is Eq. 11 for d = g.
    """

    flat: FlatParams
    loss: Objective
    loss_target: float
    guidance: float = 0.0
    metric: Metric = "euclidean"
    task_norm: float = 0.0
    rectify: bool = True
    evaluations: int = 0
    probes: int = 0
    infeasible: int = 0
    start: Slope | None = None

    @property
    def loss_start(self) -> float:
        """L(θ0)."""
        return self._first.loss

    @property
    def gap(self) -> float:
        """ΔL = L(θ1) − L(θ0)."""
        return self.loss_target - self.loss_start

    @property
    def length(self) -> float:
        """‖θ1 − θ0‖."""
        return self._first.distance

    def slope(self, t: float) -> Slope:
        """Evaluate the field at the current θ; leaves d in the gradient buffer."""
        flat = self.flat
        loss = self._gradient()
        self.evaluations += 1
        self.check_finite(loss, t)
        r_g, r_r = flat.gap_products(flat.grad)
        g_g = flat.square(flat.grad)
        if not (math.isfinite(r_g) and math.isfinite(g_g)):
            raise MergewayError(
                f"the gradient of the objective is not finite at t = {t:g}, evaluation {self.evaluations}"
            )
        norms = math.sqrt(r_r * g_g)
        seen = Slope(t, loss, 1.0, abs(r_g) / norms if norms > 0 else 0.0, math.sqrt(r_r))
        self.start = self.start or seen
        d_g = apply_metric(self.metric, flat)
        alpha = scheduler(t)
        u_g = alpha * r_g
        gamma = damping(u_g, self.gap) if self.rectify else 1.0
        v = rectified(gamma)
        # g = 0 leaves nothing to decompose: u∥ = 0 and v = u.
        to_gradient = v.parallel * u_g / d_g if d_g > 0 else 0.0
        if self.guidance and d_g > 0:
            to_gradient -= self.guidance * alpha * math.sqrt(r_r) / math.sqrt(flat.square(flat.grad))
        return replace(seen, gamma=gamma, to_target=v.u * alpha, to_gradient=to_gradient)

    def guided(self, t: float, value: float, total: Tensor) -> Slope:
        """u − η·g_M, η = guidance·‖u‖/‖g_M‖, from the tasks' gradients added up: the released code's transport."""
        self.evaluations += 1
        self.check_finite(value, t)
        flat, alpha = self.flat, scheduler(t)
        flat.grad.copy_(total)
        r_g, r_r = flat.gap_products(flat.grad)
        norm = math.sqrt(flat.square(flat.grad))
        to_gradient = -self.guidance * alpha * math.sqrt(r_r) / norm if norm > 0 else 0.0
        alignment = abs(r_g) / (math.sqrt(r_r) * norm) if norm > 0 and r_r > 0 else 0.0
        return Slope(t, value, 1.0, alignment, math.sqrt(r_r), alpha, to_gradient)

    def velocity(self, here: Slope) -> Tensor:
        """v at the point of the last slope, written into the spare vector."""
        return self.flat.velocity_into(self.flat.spare, here.to_target, here.to_gradient)

    def measure(self, t: float, before: Slope | None = None) -> Slope:
        """Loss and distance without a gradient; γ and the alignment are those of the step before."""
        self.probes += 1
        loss = self.flat.value(self.loss)
        self.check_finite(loss, t)
        distance = math.sqrt(self.flat.gap_products(self.flat.theta)[1])
        gamma, alignment = (before.gamma, before.alignment) if before else (1.0, 0.0)
        seen = Slope(t, loss, gamma, alignment, distance)
        self.start = self.start or seen
        return seen

    def look(self, t: float, before: Slope, end: float) -> Slope:
        """The slope at t; at the end only the loss, which costs no gradient."""
        return self.slope(t) if t < end else self.measure(end, before)

    def task_losses(self) -> dict[str, float]:
        """The loss of every task at the current θ."""
        self.probes += 1
        return self.loss.task_losses(self.flat.params)

    def holds(self, seen: Slope) -> bool:
        """Whether the envelope of Theorem 3.4 holds at a point."""
        return within_envelope(seen.time, seen.loss, self.loss_start, self.gap)

    def check_finite(self, value: float, t: float) -> None:
        """Refuse to go on with a loss that is no number."""
        if not math.isfinite(value):
            raise MergewayError(
                f"the objective is {value} at t = {t:g}, evaluation {self.evaluations}; the calibration data or the arrival does not fit the model"
            )

    @property
    def _first(self) -> Slope:
        if self.start is None:
            raise MergewayError("the field was not evaluated at its start yet")
        return self.start

    def _gradient(self) -> float:
        if self.metric == "diagonal" or self.task_norm:
            return combined_gradient(self.flat, self.loss, self.task_norm, diagonal=self.metric == "diagonal")
        return self.flat.gradient(self.loss)
