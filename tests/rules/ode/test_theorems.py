"""Theorems 3.3 and 3.4 of ODE-M on random landscapes.

The theorems speak of the continuous path. What a step of length h may lose against it follows from Taylor's formula and the
largest curvature of the landscape, so the slack below is not a guess; it goes to 0 with h.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import Landscape, hills

import mergeway as mw

STEP = 1 / 150
landscapes = st.builds(
    hills,
    st.integers(0, 10_000),
    kappa=st.floats(0.01, 0.5),
    radius=st.floats(0.7, 2.0),
    ripples=st.floats(0.0, 0.2),
)


def curvature(land: Landscape) -> float:
    """No direction of the landscape bends more: |x/r|²·exp(−|x/r|²/2) and its like stay below 1."""
    return land.kappa + np.abs(land.heights).sum() / land.radius**2 + land.ripples * (land.ripple @ land.ripple)


def walk(land: Landscape, step: float = STEP) -> mw.Trajectory:
    return mw.trajectory(*land.ends(), land.torch_loss, 0.9, "euler", step)


@settings(max_examples=10)
@given(land=landscapes)
def test_convergence(land):
    """‖e(t)‖ ≤ ‖e(0)‖(1 − t)^(1−ρ) with the measured ρ (Eq. 31)."""
    path = walk(land)
    rho = max(path.alignments[:-1])
    assert path.rho == rho <= 1
    times, distances = np.array(path.times), np.array(path.distances)
    x = np.diff(times) / (1 - times[:-1])
    # (1 − x)^a ≤ 1 − ax ≤ (1 − x)^a·exp(x²) for the x that occur here.
    assert x.max() < 0.1
    slack = np.exp(np.concatenate([[0.0], np.cumsum(x**2)]))
    bound = distances[0] * (1 - times) ** (1 - rho) * slack
    assert (distances <= bound + 1e-12).all()
    assert path.distance_bound == distances[0] * (1 - path.until) ** (1 - rho)
    assert path.distances[-1] <= path.distance_bound * slack[-1] + 1e-12


@settings(max_examples=10)
@given(land=landscapes)
def test_bounded_barrier(land):
    """L(θ(t)) ≤ L(θ0) + t·max(ΔL, 0) (Eq. 16) and B ≤ max(L(θ0) − L(θ1), 0) (Eq. 17)."""
    path = walk(land)
    times, losses, distances = np.array(path.times), np.array(path.losses), np.array(path.distances)
    h = np.diff(times)
    # Each step may rise by ½h²M‖v‖² over its slope, and ‖v‖ ≤ ‖u‖.
    rises = 0.5 * curvature(land) * (h * distances[:-1] / (1 - times[:-1])) ** 2
    slack = np.concatenate([[0.0], np.cumsum(rises)])
    gap = land.loss(land.x1) - land.loss(land.x0)
    assert abs(path.gap - gap) < 1e-9
    assert (losses <= losses[0] + times * max(gap, 0.0) + slack + 1e-9).all()
    assert path.bound == max(-path.gap, 0.0)
    assert path.barrier <= path.bound + slack[-1] + 1e-9
    line = (1 - times) * losses[0] + times * land.loss(land.x1)
    assert abs(path.barrier - max(losses - line)) < 1e-9


def test_the_straight_way_breaks_the_envelope_where_the_path_keeps_it():
    """Without the damping the theorem fails by much more than the slack, so the test above can fail."""
    excess = {}
    for barrier in ("path", "none"):
        worst = 0.0
        for seed in (2, 3, 4, 10):
            land = hills(seed)
            path = mw.trajectory(*land.ends(), land.torch_loss, 0.9, step=STEP, barrier=barrier)
            above = [
                loss - path.losses[0] - t * max(path.gap, 0.0) for t, loss in zip(path.times, path.losses, strict=True)
            ]
            worst = max(worst, *above)
        excess[barrier] = worst
    assert excess["none"] > 0.3
    assert excess["path"] < 0.02


def test_the_excess_goes_to_zero_with_the_step():
    land = hills(4, kappa=0.5)
    excess = []
    for step in (0.02, 0.01, 0.005):
        path = walk(land, step)
        excess.append(max(np.array(path.losses) - path.losses[0] - np.array(path.times) * max(path.gap, 0.0)))
    assert excess[0] > excess[1] > excess[2] > 0
    assert 1.6 < excess[0] / excess[1] < 2.5
