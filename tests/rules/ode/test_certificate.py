"""`certify` keeps the envelope where shorter steps can, and says so where they cannot."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from landscapes import Landscape, hills, vector

import mergeway as mw

# Hills beside the way: steps of 0.1 climb them, shorter ones see them in time.
AVOIDABLE = [8, 10, 13, 15]
# Here the level set bends away, so that every step along its tangent rises, however short.
UNAVOIDABLE = [1, 2, 4, 9, 11]


def bumpy(seed: int) -> Landscape:
    land = hills(seed, radius=0.7, ripples=0.0)
    return replace(land, middle=land.x1)


def excess(land: Landscape, path: mw.Trajectory) -> float:
    """How far the measured losses are above L(θ0) + t·max(ΔL, 0), with the ends' losses from the landscape itself."""
    start, gap = land.loss(land.x0), land.loss(land.x1) - land.loss(land.x0)
    return max(loss - start - t * max(gap, 0.0) for t, loss in zip(path.times, path.losses, strict=True))


@pytest.mark.parametrize("seed", AVOIDABLE)
@pytest.mark.parametrize("solver", ["euler", "adaptive"])
def test_the_envelope_holds_where_it_can(seed, solver):
    land = bumpy(seed)
    plain = mw.trajectory(*land.ends(), land.torch_loss, 0.7, step=0.1)
    assert not plain.certified
    assert excess(land, plain) > 1e-3
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.7, solver, 0.1, certify=True)
    assert path.certified
    assert excess(land, path) <= 1e-6
    assert path.shortened > 0
    assert path.times[-1] == 0.7
    assert path.losses[-1] == pytest.approx(land.loss(vector(path.end)), abs=1e-12)


@pytest.mark.parametrize("seed", UNAVOIDABLE)
@pytest.mark.parametrize("solver", ["euler", "adaptive"])
def test_a_broken_envelope_is_admitted(seed, solver):
    land = bumpy(seed)
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.7, solver, 0.1, certify=True)
    assert excess(land, path) > 1e-6
    assert not path.certified
    assert path.shortened > 0
    assert path.times[-1] == 0.7
    assert path.summary()["certified"] is False


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("certify", [False, True])
def test_certified_means_certified(seed, certify):
    """The flag says what the numbers say, whether or not anything was done about it."""
    for land in (hills(seed), hills(seed, kappa=0.5), bumpy(seed)):
        path = mw.trajectory(*land.ends(), land.torch_loss, 0.7, step=0.1, certify=certify)
        room = 1e-6 * max(1.0, abs(land.loss(land.x0)))
        assert path.certified == (excess(land, path) <= room)


def test_nothing_to_shorten_costs_nothing():
    """Where the envelope holds anyway, certifying takes the same steps and the same gradients."""
    land = bumpy(3)
    plain, path = (mw.trajectory(*land.ends(), land.torch_loss, 0.7, step=0.1, certify=c) for c in (False, True))
    assert plain.certified and path.certified
    assert np.abs(vector(plain.end) - vector(path.end)).max() < 1e-12
    assert path.evaluations == plain.evaluations
    assert path.shortened == 0


def test_saved_times_are_kept_by_a_certified_path():
    land = bumpy(10)
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.7, step=0.1, certify=True, save=[0.33, 0.5])
    for t in (0.33, 0.5):
        assert land.loss(vector(path.at(t))) == pytest.approx(path.losses[path.times.index(t)], abs=1e-12)
