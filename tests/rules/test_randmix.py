"""RandMix: entries come from arrivals only, in the promised shares, and the same way every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from streams import LARGE, UNIFORM, WEIGHTED, make_stream, updates_of

import mergeway
from mergeway.core.tensors import BLOCK


def source_of_entries(stream, merged) -> np.ndarray:
    """For every entry of the model the arrival it equals; fails when there is none."""
    found = []
    for name, tensor in merged.items():
        stack = torch.stack([arrival[name] for arrival in stream.arrivals]).double().numpy()
        # base + (arrival − base) may be one rounding away from the arrival; other arrivals are thousands of roundings away.
        gaps = np.abs(stack - tensor.double().numpy())
        assert np.all(gaps.min(axis=0) <= 1e-7)
        found.append(gaps.argmin(axis=0).ravel())
    return np.concatenate(found)


@pytest.mark.parametrize("weights", [UNIFORM, WEIGHTED], ids=["uniform", "weighted"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shares_are_those_of_the_weights(weights, seed):
    stream = make_stream(10)
    merged = mergeway.merge(stream.base, stream.arrivals, "randmix", weights, seed=seed)
    sources = source_of_entries(stream, merged)
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        deviation = np.sqrt(share * (1 - share) / sources.size)
        assert abs(np.mean(sources == i) - share) <= 5 * deviation


def test_neighbours_and_tensors_are_drawn_independently():
    """The source of an entry says nothing about the next entry's, nor about the same place in another tensor."""
    stream = make_stream(11, count=2)
    sources = source_of_entries(stream, mergeway.merge(stream.base, stream.arrivals, "randmix"))
    half = sources.size // 2
    for a, b in ((sources[:-1], sources[1:]), (sources[:half], sources[half : 2 * half])):
        assert abs(np.corrcoef(a, b)[0, 1]) <= 5 / np.sqrt(a.size)


def test_blocks_of_one_tensor_are_drawn_independently():
    """A large tensor is worked on in blocks; entries at the same place in two blocks must not share their source."""
    stream = make_stream(15, count=2, shapes=LARGE)
    sources = source_of_entries(stream, mergeway.merge(stream.base, stream.arrivals, "randmix"))
    a, b = sources[:-BLOCK], sources[BLOCK:]
    assert a.size > 2000
    assert abs(np.corrcoef(a, b)[0, 1]) <= 5 / np.sqrt(a.size)


def test_an_arrival_replaces_entries_and_touches_no_others():
    stream = make_stream(12)
    before = mergeway.merge(stream.base, stream.arrivals[:3], "randmix")
    after = mergeway.merge(stream.base, stream.arrivals[:4], "randmix")
    for name in after:
        changed = after[name] != before[name]
        assert torch.allclose(after[name][changed], stream.arrivals[3][name][changed], atol=1e-7)


def test_seed_decides():
    stream = make_stream(13)
    a, b, c = (mergeway.merge(stream.base, stream.arrivals, "randmix", seed=s) for s in (4, 4, 5))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_scaling_scales_the_update():
    stream = make_stream(14)
    whole = updates_of(stream.base, mergeway.merge(stream.base, stream.arrivals, "randmix"))
    half = updates_of(stream.base, mergeway.merge(stream.base, stream.arrivals, "randmix", scaling=0.5))
    for name in whole:
        np.testing.assert_allclose(half[name], 0.5 * whole[name], atol=1e-7)
