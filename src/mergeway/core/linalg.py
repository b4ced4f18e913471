"""The few pieces of linear algebra that the rules share, for tensors on any device; no result depends on the thread count.

On the CPU NumPy does the work: its BLAS is the faster of the two at hand, knows that xᵀx is symmetric, and
`core.pool.worker_pool` holds it to one thread. Elsewhere torch does.
"""

from __future__ import annotations

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
    if a.device.type != "cpu":
        return float((a.reshape(-1).double() * b.reshape(-1)).sum())
    x, y = a.reshape(-1).numpy(), b.reshape(-1).numpy()
    return float(
        sum(np.add.reduce(x[i : i + _CHUNK].astype(np.float64) * y[i : i + _CHUNK]) for i in range(0, x.size, _CHUNK))
    )


def squared_norm(a: Tensor) -> float:
    """‖a‖² accumulated in float64."""
    return dot(a, a)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b for two matrices in memory of torch's own: on tensors mapped from a file, BLAS rounds by how they are aligned."""
    return torch.from_numpy(a.numpy() @ b.numpy()) if a.device.type == "cpu" else a @ b


class RightBasis(NamedTuple):
    """The singular values of a matrix, descending, and its right singular vectors, in float64 and as many as its rank."""

    sigma: Tensor
    v: Tensor


def right_basis(a: Tensor) -> RightBasis:
    """Singular values and right vectors of a tall matrix from its Gram matrix, cut at RANK_CUT.

    In float64 the squared condition number does no harm down to RANK_CUT, and one symmetric eigenproblem is two to four
    times faster than a full SVD of the same matrix.
    """
    x = a.to(torch.float64, copy=True)
    values, vectors = _eigh(product(x.mT, x))
    sigma = values.flip(0).clamp_min(0).sqrt()
    rank = int((sigma > RANK_CUT * sigma[:1]).sum())
    return RightBasis(sigma[:rank].clone(), vectors.flip(1)[:, :rank].contiguous())


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    if gram.device.type != "cpu":
        return torch.linalg.eigh(gram)
    values, vectors = np.linalg.eigh(gram.numpy())
    return torch.from_numpy(values), torch.from_numpy(vectors)


def precision(sigma: Tensor, dtype: torch.dtype, most: float = 1e4) -> torch.dtype:
    """The dtype in which to multiply by the inverse of a matrix with these singular values: its own where they allow it.

    Dividing by σ magnifies rounding: in float32 the result is off by about 1.3e-8·sqrt(mean of (typical σ / σ_i)²), so
    the limit stands for an error near 1e-6. Where every direction counts alike, it is off by 30 times as much.
    """
    magnified = float((sigma.square().mean() / sigma.square()).mean())
    return dtype if magnified < most else torch.float64


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


def symmetric_inverse(a: Tensor) -> Tensor:
    """The pseudo-inverse of a symmetric matrix, its rank cut at RANK_CUT."""
    return torch.linalg.pinv(a, rtol=RANK_CUT, hermitian=True)


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
    half = v * (sigma.mean() / sigma).sqrt()
    # Here every direction counts alike, the shortest as much as the longest.
    dtype = precision(sigma, a.dtype, most=10)
    return product(a.to(dtype, copy=True), product(half, half.mT).to(dtype)).to(a.dtype)
