"""The trajectory between two real experts, when the suite mini8 is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

import mergeway as mw

SUITE = Path(os.environ.get("MERGEWAY_MINI8", Path(__file__).parents[4] / "shared" / "suites" / "mini8"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SUITE / "suite.json").exists(), reason=f"the suite mini8 is not at {SUITE}; set MERGEWAY_MINI8"
    ),
]


@pytest.mark.parametrize(("old", "new"), [("mnist", "gtsrb"), ("cifar10", "quickdraw")])
def test_adaptive_is_as_good_as_a_thousand_steps(old, new):
    """Within 1 % of the way of the h = 10⁻³ Euler end, for a tenth of its gradients."""
    suite = mw.load_suite(SUITE)
    start, target = (load_file(suite.task(n).expert / "model.safetensors") for n in (old, new))
    objective = suite.objective([old, new], size=64)
    fine = mw.trajectory(start, target, objective, 0.5, "euler", 1e-3)
    path = mw.trajectory(start, target, objective, 0.5, "adaptive")
    names = [n for n in start if start[n].is_floating_point()]
    off = sum(float((path.end[n] - fine.end[n]).double().square().sum()) for n in names) ** 0.5
    way = sum(float((fine.end[n] - start[n]).double().square().sum()) for n in names) ** 0.5
    assert off <= 0.01 * way
    assert path.evaluations <= fine.evaluations / 10
