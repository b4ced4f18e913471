"""TIES on a grid of exact numbers: every sum, scaling and comparison is exact, so the bits must agree, equal magnitudes and all."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from streams import LARGE, SHAPES, Stream, make_stream, updates_of

import mergeway

# Powers of two keep every relative weight and every η of this stream a short binary fraction.
WEIGHTS = [1.0, 1.0, 2.0, 4.0, 8.0]


def grid_stream(seed: int, shapes: dict[str, tuple[int, ...]]) -> Stream:
    """Updates that are small multiples of 1/64: thousands share each magnitude, and many are zero."""
    rng = np.random.default_rng(seed)

    def draw(spread: int) -> dict[str, np.ndarray]:
        return {n: rng.integers(-spread, spread + 1, shape) / 64 for n, shape in shapes.items()}

    base = draw(200)
    arrivals = []
    for spread in (3, 9, 5, 20, 2):
        change = draw(spread)
        arrivals.append({n: torch.from_numpy(base[n] + change[n]).float() for n in base})
    return Stream({n: torch.from_numpy(a).float() for n, a in base.items()}, arrivals)


@pytest.mark.parametrize("form", ["base", "compound", "mean"])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.2, 0.55, 1.0])
@pytest.mark.parametrize("shapes", [SHAPES, LARGE], ids=["many tensors", "several blocks"])
def test_grid_stream_agrees_to_the_bit(form, density, shapes):
    stream = grid_stream(7, shapes)
    steps = oracle.ties(stream.deltas, WEIGHTS, form, density, 0.5)
    for k, expected in enumerate(steps, 1):
        merged = mergeway.merge(
            stream.base, stream.arrivals[:k], "ties", WEIGHTS[:k], form=form, density=density, scaling=0.5
        )
        got = updates_of(stream.base, merged)
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name])


@pytest.mark.parametrize("form", ["base", "compound", "mean"])
def test_kept_support_is_exact_on_ordinary_numbers(form):
    stream = make_stream(8)
    for k, expected in enumerate(oracle.ties(stream.deltas, [1.0] * 5, form, 0.2, 0.3), 1):
        got = updates_of(stream.base, mergeway.merge(stream.base, stream.arrivals[:k], "ties", form=form))
        for name in expected:
            np.testing.assert_array_equal(got[name] != 0, expected[name] != 0)


def opposed(majority: int) -> Stream:
    """Entry 0 is torn between +0.5 and −0.5; all others agree on one sign."""
    base = {"w": torch.zeros(8)}
    first = torch.full((8,), 0.5 * majority)
    second = torch.full((8,), 0.25 * majority)
    # `scaling` halves the first arrival, so the second opposes half of it.
    first[0], second[0] = 1.0, -0.5
    return Stream(base, [{"w": first}, {"w": second}])


@pytest.mark.parametrize("majority", [1, -1])
def test_a_torn_entry_takes_the_global_majority_sign(majority):
    stream = opposed(majority)
    merged = mergeway.merge(stream.base, stream.arrivals, "ties", density=1.0, scaling=0.5)
    assert merged["w"][0].item() == 0.5 * 0.5 * majority
    assert merged["w"][1].item() == 0.5 * (0.25 + 0.25) * majority


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_threshold_itself_is_kept_and_the_number_below_it_is_not(dtype):
    base = {"w": torch.zeros(6, dtype=dtype)}
    edge = torch.tensor(0.75, dtype=dtype)
    below = torch.nextafter(edge, torch.zeros((), dtype=dtype))
    second = torch.stack([edge, below, -edge, -below, edge * 2, edge * 0])
    arrivals = [{"w": torch.zeros(6, dtype=dtype)}, {"w": second}]
    merged = mergeway.merge(base, arrivals, "ties", density=0.5, scaling=1.0)
    assert torch.equal(merged["w"], torch.stack([edge, edge * 0, -edge, edge * 0, edge * 2, edge * 0]))
