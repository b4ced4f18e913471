"""The few pieces of linear algebra that the rules share; sums are accumulated in float64 and never depend on the thread count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Singular values below this share of the largest count as zero: their vectors are rounding noise, and any pairing of null
# vectors would be arbitrary (float32 and float64 disagree by several percent there).
RANK_CUT = 1e-6

# NumPy's own pairwise sum of a float64 product: one thread, the same bits on any number of cores (a BLAS dot is neither).
_CHUNK = 1 << 16


def dot(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ accumulated in float64."""
    x, y = a.reshape(-1).numpy(), b.reshape(-1).numpy()
    return float(
        sum(np.add.reduce(x[i : i + _CHUNK].astype(np.float64) * y[i : i + _CHUNK]) for i in range(0, x.size, _CHUNK))
    )


def squared_norm(a: Tensor) -> float:
    """‖a‖² accumulated in float64."""
    return dot(a, a)


# Applies a function to every block of a large vector and returns the results in order.
Each = Callable[[Callable[[Tensor], Any]], list[Any]]


class RightBasis(NamedTuple):
    """The singular values of a matrix, descending, and its right singular vectors, in float64 and as many as its rank."""

    sigma: Tensor
    v: Tensor


def right_basis(a: Tensor) -> RightBasis:
    """Singular values and right vectors of a tall matrix from its Gram matrix, cut at RANK_CUT.

    In float64 the squared condition number does no harm down to RANK_CUT, and one symmetric eigenproblem is two to four
    times faster than a full SVD of the same matrix. NumPy's BLAS knows that xᵀx is symmetric and is the faster of the two
    at hand; `engine.worker_pool` holds it to one thread.
    """
    # A copy in memory of torch's own: on tensors mapped from a file, BLAS rounds by how they happen to be aligned.
    x = a.to(torch.float64, copy=True).numpy()
    values, vectors = np.linalg.eigh(x.T @ x)
    sigma = np.sqrt(values[::-1].clip(0))
    rank = int((sigma > RANK_CUT * sigma[:1]).sum())
    return RightBasis(torch.from_numpy(sigma[:rank].copy()), torch.from_numpy(vectors[:, ::-1][:, :rank].copy()))


class ThinSVD(NamedTuple):
    """a = U diag(sigma) Vᵀ with the numerical rank's columns only, in float64, sigma descending."""

    u: Tensor
    sigma: Tensor
    v: Tensor


def thin_svd(a: Tensor) -> ThinSVD:
    """Singular value decomposition of the numerical rank."""
    if a.shape[0] < a.shape[1]:
        u, sigma, v = thin_svd(a.mT)
        return ThinSVD(v, sigma, u)
    sigma, v = right_basis(a)
    return ThinSVD((a.to(torch.float64, copy=True) @ v) / sigma, sigma, v)


def flat_spectrum(a: Tensor) -> Tensor:
    """mean(σ)·U Vᵀ: `a` with all its singular values replaced by their mean; the zero matrix stays zero.

    Equals a·(aᵀa)^(-1/2)·mean(σ), so it needs no left vectors.
    """
    m, n = a.shape
    if m < n:
        return flat_spectrum(a.mT).mT
    sigma, v = right_basis(a)
    if not sigma.numel():
        return torch.zeros_like(a)
    return (a.to(torch.float64, copy=True) @ ((v * (sigma.mean() / sigma)) @ v.mT)).to(a.dtype)


def nth_largest(each: Each, size: int, n: int) -> float:
    """The n-th largest of `size` magnitudes that are never held together: exact, in two walks and little memory.

    A random sample brackets the value; one walk then counts what lies above and keeps only what lies between. `each(f)`
    applies f to every block of magnitudes and returns the results in order.
    """
    if n <= 0:
        return float("inf")
    if n >= size:
        return 0.0
    sample = _sample(each, size)
    margin = 6.0
    while True:
        low, high = _bracket(sample, n / size, margin)
        above, at_high, at_low, inside = _count(each, low, high)
        # Many entries may be equal to an end of the bracket (zeros, coarse dtypes), so the ends are counted, not kept.
        if above < n <= above + at_high:
            return high
        rank = n - above - at_high
        if 0 < rank <= inside.size:
            return float(np.partition(inside, inside.size - rank)[inside.size - rank])
        if 0 < rank <= inside.size + at_low:
            return low
        margin *= 4


def _count(each: Each, low: float, high: float) -> tuple[int, int, int, np.ndarray]:
    """How many magnitudes lie above the bracket, on its upper and on its lower end, and those strictly inside."""

    def look(block: Tensor) -> tuple[int, int, int, np.ndarray]:
        x = block.numpy()
        over, below = x >= high, x <= low
        above = int(np.count_nonzero(x > high))
        at_high = int(np.count_nonzero(over)) - above
        at_low = int(np.count_nonzero(below) - np.count_nonzero(x < low))
        return above, at_high, at_low, x[~(over | below)]

    found = each(look)
    above, at_high, at_low = (sum(f[i] for f in found) for i in range(3))
    return above, at_high, at_low, np.concatenate([f[3] for f in found])


def _sample(each: Each, size: int) -> np.ndarray:
    """About a million magnitudes drawn at random, largest first."""
    share = min(1.0, (1 << 20) / size)

    def draw(block: Tensor) -> np.ndarray:
        picks = max(1, round(share * block.numel()))
        return block.numpy()[np.random.default_rng(block.numel()).integers(block.numel(), size=picks)]

    return np.sort(np.concatenate(each(draw)))[::-1]


def _bracket(sample: np.ndarray, share: float, margin: float) -> tuple[float, float]:
    """Values that hold the quantile between them with near certainty: its rank in the sample, ± margin standard deviations."""
    spread = margin * (sample.size * share * (1 - share)) ** 0.5 + margin
    above, below = int(sample.size * share - spread), int(sample.size * share + spread) + 1
    high = float(sample[above]) if above >= 0 else float("inf")
    low = float(sample[below]) if below < sample.size else 0.0
    return low, high
