"""Weights count only against each other, and the average does not mind the order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lawful import CASES, distance, few, fold, length, some, streams, update_of

import mergeway

EXACT = (torch.float32, torch.float64)


@pytest.mark.parametrize("case", CASES)
@few
@given(stream=streams(dtypes=EXACT), factor=st.sampled_from([0.01, 0.125, 3.0, 700.0]))
def test_scaling_all_weights_changes_nothing(case, stream, factor):
    scaled = [factor * w for w in stream.weights]
    a, b = (
        update_of(stream.base, fold(case, stream.base, stream.arrivals, weights))
        for weights in (stream.weights, scaled)
    )
    assert distance(a, b) <= 5e-6 * length(a)  # Adam, which steer uses, makes more of a rounding than a sum does


@pytest.mark.parametrize("case", CASES)
@few
@given(stream=streams(dtypes=EXACT), weight=st.sampled_from([0.3, 4.0]))
def test_equal_weights_are_no_weights(case, stream, weight):
    plain = update_of(stream.base, fold(case, stream.base, stream.arrivals))
    weights = [weight] * len(stream.arrivals)
    weighted = update_of(stream.base, fold(case, stream.base, stream.arrivals, weights))
    assert distance(plain, weighted) <= 2e-6 * length(plain)


@pytest.mark.parametrize("case", ["average", "task-arithmetic", "task-arithmetic mean", "iso"])
@some
@given(stream=streams(dtypes=EXACT), data=st.data())
def test_order_does_not_matter(case, stream, data):
    order = data.draw(st.permutations(range(len(stream.arrivals))))
    shuffled = [stream.arrivals[i] for i in order], [stream.weights[i] for i in order]
    a = update_of(stream.base, fold(case, stream.base, stream.arrivals, stream.weights))
    b = update_of(stream.base, fold(case, stream.base, shuffled[0], shuffled[1]))
    assert distance(a, b) <= 2e-5 * length(a)


@some
@given(stream=streams())
def test_average_is_the_weighted_mean(stream):
    merged = mergeway.merge(stream.base, stream.arrivals, "average", stream.weights)
    total = sum(stream.weights)
    for name, tensor in merged.items():
        if not tensor.is_floating_point():
            continue
        mean = sum(w * a[name].double() for w, a in zip(stream.weights, stream.arrivals, strict=True)) / total
        step = torch.finfo(tensor.dtype).eps
        assert torch.all((tensor.double() - mean).abs() <= 0.51 * step * mean.abs().clamp_min(1e-4) + 2e-7)


@some
@given(stream=streams(dtypes=EXACT))
def test_an_average_of_one_model_is_that_model(stream):
    same = [stream.arrivals[0]] * len(stream.weights)
    merged = mergeway.merge(stream.base, same, "average", stream.weights)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, same[0][name], rtol=1e-6, atol=1e-6)
