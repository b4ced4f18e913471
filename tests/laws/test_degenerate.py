"""Streams that give a rule nothing to work with: the base itself as an arrival, the same arrival twice, updates of rank one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lawful import CASES, few, fold, same_bits, streams, update_of

import mergeway


def all_finite(model: dict[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in model.values() if t.is_floating_point())


@pytest.mark.parametrize("case", CASES)
@few
@given(stream=streams(), place=st.integers(0, 3))
def test_the_base_as_an_arrival(case, stream, place):
    arrivals = list(stream.arrivals)
    arrivals.insert(place, stream.base)
    merged = fold(case, stream.base, arrivals, [1.0, *stream.weights])
    assert all_finite(merged)
    if case != "randmix":
        assert not same_bits(merged, stream.base)


@pytest.mark.parametrize("case", CASES)
@few
@given(stream=streams())
def test_nothing_but_the_base_is_the_base(case, stream):
    merged = fold(case, stream.base, [stream.base] * len(stream.weights), stream.weights)
    for name, tensor in merged.items():
        assert torch.equal(tensor, stream.base[name])


@pytest.mark.parametrize("case", CASES)
@few
@given(stream=streams())
def test_the_same_arrival_twice(case, stream):
    arrivals = [stream.arrivals[0], stream.arrivals[0], *stream.arrivals[1:]]
    assert all_finite(fold(case, stream.base, arrivals, [1.0, *stream.weights]))


@few
@given(stream=streams(dtypes=(torch.float32,)))
def test_opcm_counts_only_the_norm_of_an_arrival_equal_to_the_base(stream):
    """An empty update changes no direction: the deployed update shrinks with the mean norm and nothing else."""
    first = update_of(stream.base, mergeway.merge(stream.base, stream.arrivals[:1], "opcm"))
    then = update_of(stream.base, mergeway.merge(stream.base, [stream.arrivals[0], stream.base], "opcm"))
    for name in first:
        torch.testing.assert_close(then[name], first[name] / 2, rtol=1e-5, atol=1e-6)


@few
@given(stream=streams(dtypes=(torch.float32,)))
def test_iso_of_a_repeated_arrival_is_the_sum(stream):
    """k equal arrivals sum to k times one, so a matrix is k times as long and every other tensor is that of one."""
    one = update_of(stream.base, mergeway.merge(stream.base, stream.arrivals[:1], "iso"))
    three = update_of(stream.base, mergeway.merge(stream.base, stream.arrivals[:1] * 3, "iso"))
    for name in one:
        times = 3 if name in ("square.weight", "wide.weight", "tall.weight") else 1
        torch.testing.assert_close(three[name], times * one[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_odd_shapes(case):
    """A scalar, an empty tensor, a single row, a single column, a single entry."""
    shapes = {"scale": (), "none": (0, 4), "row.weight": (1, 7), "column.weight": (7, 1), "one.weight": (1, 1)}
    base = {name: torch.ones(shape) for name, shape in shapes.items()}
    arrivals = [{name: t + 0.5 + k for name, t in base.items()} for k in range(3)]
    merged = fold(case, base, arrivals)
    assert all_finite(merged)
    assert {name: tuple(t.shape) for name, t in merged.items()} == shapes
