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


class ThinSVD(NamedTuple):
    """a = U diag(sigma) Vᵀ with the numerical rank's columns only, in float64, sigma descending."""

    u: Tensor
    sigma: Tensor
    v: Tensor


def thin_svd(a: Tensor) -> ThinSVD:
    """Singular value decomposition through the Gram matrix of the shorter side, cut at RANK_CUT.

    In float64 the squared condition number does no harm down to RANK_CUT, and one symmetric eigenproblem is two to four
    times faster than a full SVD of the same matrix.
    """
    m, n = a.shape
    if m < n:
        u, sigma, v = thin_svd(a.mT)
        return ThinSVD(v, sigma, u)
    x = _fresh(a)
    values, vectors = torch.linalg.eigh(_gram(x))
    sigma = values.flip(0).clamp_min(0).sqrt()
    rank = int((sigma > RANK_CUT * sigma[0]).sum()) if sigma.numel() else 0
    v, sigma = vectors.flip(1)[:, :rank], sigma[:rank]
    return ThinSVD((x @ v) / sigma, sigma, v)


def _fresh(a: Tensor) -> Tensor:
    """A float64 copy in memory of torch's own: on tensors mapped from a file, BLAS rounds by how they happen to be aligned."""
    return a.to(torch.float64, copy=True)


def _gram(x: Tensor) -> Tensor:
    """The lower triangle of xᵀx, which is all that `eigh` reads, by columns: five eighths of the whole product's work."""
    n = x.shape[1]
    gram, width = x.new_zeros(n, n), max(1, -(-n // 4))
    for i in range(0, n, width):
        gram[i:, i : i + width] = x[:, i:].mT @ x[:, i : i + width]
    return gram


def flat_spectrum(a: Tensor) -> Tensor:
    """mean(σ)·U Vᵀ: `a` with all its singular values replaced by their mean; the zero matrix stays zero.

    Equals a·(aᵀa)^(-1/2)·mean(σ), so it needs no left vectors.
    """
    m, n = a.shape
    if m < n:
        return flat_spectrum(a.mT).mT
    x = _fresh(a)
    values, vectors = torch.linalg.eigh(_gram(x))
    sigma = values.clamp_min(0).sqrt()
    keep = sigma > RANK_CUT * sigma[-1]
    if not bool(keep.any()):
        return torch.zeros_like(a)
    v, sigma = vectors[:, keep], sigma[keep]
    return (x @ ((v * (sigma.mean() / sigma)) @ v.mT)).to(a.dtype)


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
