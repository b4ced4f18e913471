"""The shared linear algebra against NumPy: exact selection, thin decompositions, sums in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeway.core.linalg import RANK_CUT, dot, flat_spectrum, squared_norm, thin_svd
from mergeway.core.threshold import nth_largest, search_together

often = settings(max_examples=150, derandomize=True, deadline=None)


def select(values: np.ndarray, n: int, blocks: int = 3) -> float:
    """The n-th largest by the function under test, the values cut into uneven blocks."""
    cuts = sorted({0, values.size, *(values.size * i**2 // blocks**2 for i in range(blocks))})
    pieces = [torch.from_numpy(values[a:b]) for a, b in itertools.pairwise(cuts)]
    (found,) = search_together(lambda looks: [looks(piece) for piece in pieces], [nth_largest(values.size, n)])
    return found


def test_searches_side_by_side_share_their_walks():
    rng = np.random.default_rng(3)
    vectors = [nasty(kind, 5000, rng) for kind in ("normal", "heavy tail", "few values")]
    walks = []

    def walk(looks):
        walks.append(1)
        return [looks(*(torch.from_numpy(v[a:b]) for v in vectors)) for a, b in [(0, 1000), (1000, 5000)]]

    found = search_together(walk, [nth_largest(5000, n) for n in (1, 1000, 5000)])
    assert found == [vectors[0].max(), np.sort(vectors[1])[-1000], 0.0]
    assert len(walks) == 2


def nasty(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Magnitudes that are hard to bracket by a sample."""
    normal = np.abs(rng.standard_normal(size))
    values = {
        "normal": normal,
        "all equal": np.full(size, 0.25),
        "all zero": np.zeros(size),
        "mostly zero": np.where(rng.random(size) < 0.97, 0.0, normal),
        "few values": rng.integers(0, 4, size) / 8,
        "heavy tail": np.abs(rng.standard_cauchy(size)) ** 3,
        "two clusters": np.where(rng.random(size) < 0.2, 1e6, 1e-6) * (1 + 1e-6 * normal),
        "tiny": normal * 1e-40,
        "sorted": np.sort(normal),
        "one giant": np.where(np.arange(size) == size // 2, 1e30, normal),
    }
    return values[kind].astype(np.float32)


KINDS = (
    "normal",
    "all equal",
    "all zero",
    "mostly zero",
    "few values",
    "heavy tail",
    "two clusters",
    "tiny",
    "sorted",
    "one giant",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 7, 1000, 300_000])
def test_nth_largest_is_that_of_a_full_sort(kind, size):
    values = nasty(kind, size, np.random.default_rng(size))
    ordered = np.sort(values)[::-1]
    for n in sorted({1, 2, size // 5, size // 2, size - 1} & set(range(1, size))):
        assert select(values, n) == ordered[n - 1]


@pytest.mark.parametrize("kind", ["normal", "few values", "heavy tail", "sorted", "mostly zero"])
def test_nth_largest_when_only_a_sample_is_looked_at(kind):
    """More values than the sample holds: what it brackets must still be exact."""
    values = nasty(kind, 3_000_000, np.random.default_rng(0))
    ordered = np.sort(values)[::-1]
    for n in (1, 600_000, 2_999_999):
        assert select(values, n, blocks=12) == ordered[n - 1]


@often
@given(
    values=st.lists(st.floats(0, width=32, allow_infinity=False, allow_nan=False), min_size=1, max_size=60),
    data=st.data(),
)
def test_nth_largest_of_any_numbers(values, data):
    array = np.array(values, dtype=np.float32)
    n = data.draw(st.integers(0, array.size))
    threshold = select(array, n)
    if n in (0, array.size):
        assert np.count_nonzero(array >= threshold) == n
    else:
        assert threshold == np.sort(array)[::-1][n - 1]


def test_nth_largest_of_none_and_of_all():
    values = nasty("normal", 500, np.random.default_rng(1))
    assert not (values >= select(values, 0)).any()
    assert (values >= select(values, values.size)).all()


@often
@given(seed=st.integers(0, 2**31), m=st.integers(1, 15), n=st.integers(1, 15), data=st.data())
def test_thin_svd_gives_the_matrix_back(seed, m, n, data):
    rank = data.draw(st.integers(0, min(m, n)))
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n))
    u, sigma, v = (t.numpy() for t in thin_svd(torch.from_numpy(a)))
    expected = np.linalg.svd(a, compute_uv=False)
    kept = int((expected > RANK_CUT * max(expected[0], 1e-300)).sum())
    assert sigma.size == kept
    np.testing.assert_allclose(sigma, expected[:kept], rtol=1e-6)
    np.testing.assert_allclose((u * sigma) @ v.T, a, atol=1e-9 * max(1.0, np.abs(a).max()))
    # The vectors of the shorter side are LAPACK's; those of the longer side follow from them, divided by sigma.
    shorter, longer = (v, u) if m >= n else (u, v)
    np.testing.assert_allclose(shorter.T @ shorter, np.eye(kept), atol=1e-12)
    np.testing.assert_allclose(longer.T @ longer, np.eye(kept), atol=1e-6)


def test_thin_svd_drops_what_lies_below_the_cut():
    u, _, vt = np.linalg.svd(np.random.default_rng(2).standard_normal((8, 6)), full_matrices=False)
    spectrum = np.array([1.0, 0.1, 1e-3, 1e-5, 1e-7, 0.0])
    assert thin_svd(torch.from_numpy((u * spectrum) @ vt)).sigma.numel() == 4


@often
@given(seed=st.integers(0, 2**31), m=st.integers(1, 15), n=st.integers(1, 15), data=st.data())
def test_flat_spectrum_keeps_the_vectors_and_levels_the_values(seed, m, n, data):
    rank = data.draw(st.integers(1, min(m, n)))
    rng = np.random.default_rng(seed)
    left, _ = np.linalg.qr(rng.standard_normal((m, rank)))
    right, _ = np.linalg.qr(rng.standard_normal((n, rank)))
    sigma = rng.uniform(0.1, 1.0, rank)
    flat = flat_spectrum(torch.from_numpy((left * sigma) @ right.T)).numpy()
    np.testing.assert_allclose(flat, sigma.mean() * left @ right.T, atol=1e-10)


SPECTRA = {
    "even": lambda x: 1 - 0.5 * x,
    "long tail": lambda x: np.exp(-3 * x) * (1 - 0.999 * x),
    "far apart": lambda x: 10.0 ** (-4 * x),
    "a few giants": lambda x: np.where(x < 0.03, 1.0, 0.02),
}


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("shape", [(160, 160), (400, 128), (128, 400), (200, 150)])
def test_flat_spectrum_in_float32_is_that_of_float64(kind, shape):
    """In float32 where the spectrum allows it: the result may not tell."""
    u, _, vt = np.linalg.svd(np.random.default_rng(5).standard_normal(shape), full_matrices=False)
    a = ((u * SPECTRA[kind](np.linspace(0, 1, min(shape)))) @ vt).astype(np.float32)
    u, sigma, vt = np.linalg.svd(a.astype(np.float64), full_matrices=False)
    expected = sigma.mean() * u @ vt
    flat = flat_spectrum(torch.from_numpy(a))
    assert flat.dtype is torch.float32
    assert np.linalg.norm(flat.numpy() - expected) <= 3e-6 * np.linalg.norm(expected)


def test_flat_spectrum_of_nothing_is_nothing():
    assert torch.equal(flat_spectrum(torch.zeros(3, 5)), torch.zeros(3, 5))


@often
@given(seed=st.integers(0, 2**31), size=st.integers(0, 400))
def test_dot_is_exact_for_float32(seed, size):
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    exact = float(np.sum(a.astype(np.float64) * b.astype(np.float64)))
    assert dot(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(exact, rel=1e-12, abs=1e-12)


def test_long_sums_are_accumulated_in_float64():
    """A million small squares after a large one: float32 would lose them all."""
    values = torch.full((1_000_001,), 1e-2)
    values[0] = 1e4
    small = float(values[1].double() ** 2)
    assert squared_norm(values) == pytest.approx(1e8 + 1e6 * small, rel=1e-12)
