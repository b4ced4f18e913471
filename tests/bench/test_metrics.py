"""ACC and BWT on examples worked out by hand, and utilities that change nothing when they are equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mergeway as mw
from mergeway.bench.metrics import forgetting, forward_transfer, gap_closed
from mergeway.errors import OptionError

# After folds 1, 2 and 3; what stands above the diagonal is not looked at.
MATRIX = [[90.0, np.nan, np.nan], [80.0, 70.0, 5.0], [84.0, 61.0, 50.0]]


def test_by_hand():
    assert mw.metrics.acc(MATRIX) == (84 + 61 + 50) / 3
    assert mw.metrics.bwt(MATRIX) == ((84 - 90) + (61 - 70)) / 2
    assert forgetting(MATRIX) == ((90 - 84) + (70 - 61)) / 2


def test_weighted_by_hand():
    weights = [1.0, 2.0, 5.0]
    assert mw.metrics.acc(MATRIX, weights) == pytest.approx((84 + 2 * 61 + 5 * 50) / 8)
    assert mw.metrics.bwt(MATRIX, weights) == pytest.approx((1 * -6 + 2 * -9) / 3)


def test_forward_transfer_by_hand():
    """Tasks 2 and 3 reached 40 and 30 before their turn, where the base has 35 and 33."""
    matrix = [[90.0, 40.0, np.nan], [80.0, 70.0, 30.0], [84.0, 61.0, 50.0]]
    base = [10.0, 35.0, 33.0]
    assert forward_transfer(matrix, base) == ((40 - 35) + (30 - 33)) / 2
    assert forward_transfer(matrix, base, [9.0, 1.0, 3.0]) == pytest.approx((1 * 5 + 3 * -3) / 4)
    assert forward_transfer(matrix, base, [2.0] * 3) == forward_transfer(matrix, base)
    assert forward_transfer([[42.0]], [1.0]) == 0
    with pytest.raises(OptionError, match="3 accuracies"):
        forward_transfer(matrix, [1.0, 2.0])


def test_one_task():
    assert mw.metrics.acc([[42.0]]) == 42
    assert mw.metrics.bwt([[42.0]]) == 0
    assert forgetting([[42.0]]) == 0


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.floats(0, 100), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_equal_weights_are_no_weights(matrix):
    ones = [1.0] * len(matrix)
    assert mw.metrics.acc(matrix, ones) == mw.metrics.acc(matrix)
    assert mw.metrics.bwt(matrix, ones) == mw.metrics.bwt(matrix)
    shares = [1 / len(matrix)] * len(matrix)
    assert mw.metrics.acc(matrix, shares) == pytest.approx(mw.metrics.acc(matrix))


def test_gap():
    assert gap_closed(60.0, 50.0, 70.0) == 50
    assert gap_closed(45.0, 50.0, 70.0) == -25
    assert gap_closed(45.0, 50.0, 50.0) == 0


@pytest.mark.parametrize("matrix", [[], [[1.0, 2.0]], [1.0, 2.0]])
def test_no_matrix(matrix):
    with pytest.raises(OptionError, match="square"):
        mw.metrics.acc(matrix)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, -1.0], [1.0, 2.0, float("nan")], [1.0, 0.0, 1.0]])
def test_no_weights(weights):
    with pytest.raises(OptionError, match="3 positive numbers"):
        mw.metrics.bwt(MATRIX, weights)
