"""What is kept of a path: the numbers measured on it, the parameters asked for, and its certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from mergeway.errors import OptionError
from mergeway.rules.ode.field import Slope, within_envelope
from mergeway.rules.ode.flat import FlatParams

# What a journal does not keep.
_TENSORS = ("end", "save", "saved", "again")


@dataclass
class Trajectory:
    """The path that was taken and what was measured on it.

    times, losses, gammas, alignments and distances belong together, one entry for each evaluated point; the last entry is
    the end, where γ and the alignment are not needed and therefore repeat the step before. `barrier` is B of Definition 3.2
    on the part that was travelled, `bound` that of Theorem 3.4, `rho` the largest alignment (Theorem 3.3), and `certified`
    says whether the envelope L(θ(t)) ≤ L(θ0) + t·max(ΔL, 0) held at every measured point.
    """

    until: float
    solver: str
    loss_start: float
    loss_target: float
    times: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    gammas: list[float] = field(default_factory=list[float])
    alignments: list[float] = field(default_factory=list[float])
    distances: list[float] = field(default_factory=list[float])
    evaluations: int = 0
    probes: int = 0
    shortened: int = 0
    infeasible: int = 0
    end: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)
    save: tuple[float, ...] = ()
    saved: dict[float, dict[str, Tensor]] = field(default_factory=dict[float, dict[str, Tensor]], repr=False)
    again: Callable[[float], dict[str, Tensor]] | None = field(default=None, repr=False)

    @property
    def gap(self) -> float:
        """ΔL = L(θ1) − L(θ0)."""
        return self.loss_target - self.loss_start

    @property
    def barrier(self) -> float:
        """B = sup_t L(θ(t)) − [(1−t)L(θ0) + tL(θ1)] (Eq. 6); never below 0, its value at t = 0."""
        return max(
            (loss - self.loss_start - t * self.gap for t, loss in zip(self.times, self.losses, strict=True)),
            default=0.0,
        )

    @property
    def bound(self) -> float:
        """What Theorem 3.4 allows the barrier to be: max{L(θ0) − L(θ1), 0} (Eq. 17)."""
        return max(-self.gap, 0.0)

    @property
    def rho(self) -> float:
        """The largest ‖P_g u‖/‖u‖ that was seen."""
        return max(self.alignments, default=0.0)

    @property
    def distance_bound(self) -> float:
        """‖θ0 − θ1‖(1 − t)^(1−ρ), an upper bound of the distance to the target at the end (Eq. 31)."""
        return self.distances[0] * (1.0 - self.until) ** (1.0 - self.rho) if self.distances else 0.0

    @property
    def certified(self) -> bool:
        """Whether the envelope of Eq. 16 held at every measured point, up to the rounding of the loss."""
        return all(
            within_envelope(t, loss, self.loss_start, self.gap) for t, loss in zip(self.times, self.losses, strict=True)
        )

    def at(self, t: float) -> dict[str, Tensor]:
        """The parameters at a time up to `until`; a time that was not saved is integrated again."""
        if not 0.0 <= t <= self.until:
            raise OptionError(f"t = {t!r}: the trajectory was integrated from 0 until {self.until:g}")
        if t == self.until or self.again is None:
            return self.end
        return self.saved.get(t) or self.again(t)

    def facts(self) -> dict[str, float]:
        """What a fold by this path reports."""
        return {
            "time": self.until,
            "gradients": self.evaluations,
            "barrier": self.barrier,
            "bound": self.bound,
            "gamma": min(self.gammas),
        }

    def summary(self) -> dict[str, object]:
        """What a journal keeps: every number, no tensors."""
        plain: dict[str, object] = {k: v for k, v in vars(self).items() if k not in _TENSORS}
        return plain | {
            "barrier": self.barrier,
            "bound": self.bound,
            "rho": self.rho,
            "distance_bound": self.distance_bound,
            "certified": self.certified,
        }

    def note(self, slope: Slope, flat: FlatParams) -> None:
        """Record an evaluated point, θ being at it."""
        if slope.time in self.save:
            self.saved[slope.time] = flat.tensors()
        self.times.append(slope.time)
        self.losses.append(slope.loss)
        self.gammas.append(slope.gamma)
        self.alignments.append(slope.alignment)
        self.distances.append(slope.distance)
