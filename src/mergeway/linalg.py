"""The few pieces of linear algebra that the rules share; sums are accumulated in float64 and never depend on the thread count."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    values, vectors = torch.linalg.eigh(x.mT @ x)
    sigma = values.flip(0).clamp_min(0).sqrt()
    rank = int((sigma > RANK_CUT * sigma[0]).sum()) if sigma.numel() else 0
    v, sigma = vectors.flip(1)[:, :rank], sigma[:rank]
    return ThinSVD((x @ v) / sigma, sigma, v)


def _fresh(a: Tensor) -> Tensor:
    """A float64 copy in memory of torch's own: on tensors mapped from a file, BLAS rounds by how they happen to be aligned."""
    return a.to(torch.float64, copy=True)


def flat_spectrum(a: Tensor) -> Tensor:
    """mean(σ)·U Vᵀ: `a` with all its singular values replaced by their mean; the zero matrix stays zero.

    Equals a·(aᵀa)^(-1/2)·mean(σ), so it needs no left vectors.
    """
    m, n = a.shape
    if m < n:
        return flat_spectrum(a.mT).mT
    x = _fresh(a)
    values, vectors = torch.linalg.eigh(x.mT @ x)
    sigma = values.clamp_min(0).sqrt()
    keep = sigma > RANK_CUT * sigma[-1]
    if not bool(keep.any()):
        return torch.zeros_like(a)
    v, sigma = vectors[:, keep], sigma[keep]
    return (x @ ((v * (sigma.mean() / sigma)) @ v.mT)).to(a.dtype)


Walk = Callable[[Callable[..., object]], list]


def nth_largest(each: Callable[[Callable[[Tensor], tuple]], list[tuple]], size: int, n: int) -> float:
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

        def count(block: Tensor, low: float = low, high: float = high) -> tuple:
            inside = block[(block > low) & (block < high)]
            return int((block >= high).sum()), int((block > high).sum()), int((block >= low).sum()), inside

        counts = each(count)
        at_least_high = sum(c[0] for c in counts)
        at_least_low = sum(c[2] for c in counts)
        if n <= at_least_high:
            if n > sum(c[1] for c in counts):
                return high
        elif n <= at_least_low:
            inside = torch.cat([c[3] for c in counts])
            rank = n - at_least_high
            return low if rank > inside.numel() else float(inside.topk(rank, sorted=True).values[-1])
        margin *= 4


def _sample(each: Callable[[Callable[[Tensor], tuple]], list[tuple]], size: int) -> Tensor:
    share = min(1.0, (1 << 20) / size)

    def draw(block: Tensor) -> tuple:
        generator = torch.Generator().manual_seed(block.numel())
        picks = max(1, round(share * block.numel()))
        return (block[torch.randint(block.numel(), (picks,), generator=generator)].clone(),)

    return torch.cat([s for (s,) in each(draw)]).sort(descending=True).values


def _bracket(sample: Tensor, share: float, margin: float) -> tuple[float, float]:
    """Values that hold the quantile between them with near certainty: its rank in the sample, ± margin standard deviations."""
    count = sample.numel()
    spread = margin * (count * share * (1 - share)) ** 0.5 + margin
    above, below = int(count * share - spread), int(count * share + spread) + 1
    high = float(sample[above]) if above >= 0 else float("inf")
    low = float(sample[below]) if below < count else 0.0
    return low, high
