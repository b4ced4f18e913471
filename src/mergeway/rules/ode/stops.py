"""Where a path has to be seen, whatever the length of its steps: the times to be saved, and the end."""

from __future__ import annotations

from dataclasses import dataclass

STRETCH = 1e-9  # a step is stretched by this share rather than followed by one as long as rounding
SAME_TIME = 1e-12


@dataclass(frozen=True)
class Stops:
    """The end of a path and the times on it that are saved."""

    until: float
    save: tuple[float, ...] = ()

    def after(self, t: float) -> float:
        """The next stop."""
        return min((s for s in self.save if s > t), default=self.until)

    def step_from(self, t: float, step: float) -> float:
        """The step from t, stretched or cut so that it ends at the next stop exactly."""
        left = self.after(t) - t
        return left if left <= step * (1 + STRETCH) else step

    def landed(self, t: float, h: float) -> float:
        """t + h, or the stop it was meant to reach, free of rounding."""
        stop = self.after(t)
        return stop if abs(stop - t - h) <= SAME_TIME else t + h
