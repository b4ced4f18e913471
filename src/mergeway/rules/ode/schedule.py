"""The operating time: where on the trajectory the next deployed model is taken."""

from __future__ import annotations

from collections.abc import Callable

from mergeway.errors import OptionError

# A fixed time, a function of (w_k, W_k), or nothing for the paper's schedule.
Schedule = float | Callable[[float, float], float] | None


def operating_time(weight: float, total: float, schedule: Schedule = None) -> float:
    """t_k = w_k/Σw (Eq. 18, ODE-M), a fixed t, or whatever a callable says."""
    t = weight / total if schedule is None else schedule(weight, total) if callable(schedule) else float(schedule)
    if not 0.0 <= t <= 1.0:
        raise OptionError(
            f"operating time {t!r}: it must lie between 0 (keep the deployed model) and 1 (take the arrival)"
        )
    return t
