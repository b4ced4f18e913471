"""What a stream is judged by: a lower-triangular matrix a[k, i] of accuracies, task i after fold k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from mergeway.errors import OptionError

Matrix = ArrayLike  # a square array-like; entries above the diagonal (i > k) count only in forward_transfer


def acc(matrix: Matrix, weights: Sequence[float] | None = None) -> float:
    """ACC_w = Σ w_i a[K, i] / Σ w_i over all tasks at the end (Eq. 2, ODE-M)."""
    a, w = _checked(matrix, weights)
    return float(a[-1] @ w / w.sum())


def bwt(matrix: Matrix, weights: Sequence[float] | None = None) -> float:
    """BWT_w = Σ w_i (a[K, i] − a[i, i]) / Σ w_i over all tasks but the last (Eq. 3, ODE-M); 0 for a single task."""
    a, w = _checked(matrix, weights)
    if len(a) == 1:
        return 0.0
    change = a[-1, :-1] - np.diag(a)[:-1]
    return float(change @ w[:-1] / w[:-1].sum())


def forgetting(matrix: Matrix, weights: Sequence[float] | None = None) -> float:
    """The mean fall of a task from its best to its last accuracy, over all tasks but the last."""
    a, w = _checked(matrix, weights)
    if len(a) == 1:
        return 0.0
    best = np.array([a[i:, i].max() for i in range(len(a) - 1)])
    return float((best - a[-1, :-1]) @ w[:-1] / w[:-1].sum())


def forward_transfer(matrix: Matrix, base: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """FWT_w = Σ w_i (a[i−1, i] − b_i) / Σ w_i over all tasks but the first: what folding the others does for a task before
    it is folded in itself, against the base's accuracy b_i; 0 for a single task.

    The matrix holds a[i−1, i] on the diagonal above the main one (Lopez-Paz and Ranzato 2017, with the base in the place of
    a random initialisation).
    """
    a, w = _checked(matrix, weights)
    b = np.asarray(base, dtype=np.float64)
    if b.shape != (len(a),):
        raise OptionError(f"base: expected {len(a)} accuracies, one a task")
    if len(a) == 1:
        return 0.0
    change = np.diag(a, 1) - b[1:]
    return float(change @ w[1:] / w[1:].sum())


def gap_closed(accuracy: float, base: float, experts: float) -> float:
    """The share of the distance from the base to the experts, in percent."""
    return 100.0 * (accuracy - base) / (experts - base) if experts != base else 0.0


def _checked(matrix: Matrix, weights: Sequence[float] | None) -> tuple[np.ndarray, np.ndarray]:
    a = np.asarray(matrix, dtype=np.float64)
    if a.ndim != 2 or a.shape[0] != a.shape[1] or a.shape[0] == 0:
        raise OptionError(f"an accuracy matrix is square, one row a fold; this one is {list(a.shape)}")
    w = np.ones(len(a)) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != (len(a),) or not np.isfinite(w).all() or (w <= 0).any():
        raise OptionError(f"weights: expected {len(a)} positive numbers, one a task")
    return a, w
