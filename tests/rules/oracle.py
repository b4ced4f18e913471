"""The rules written out from the papers' equations: plain float64 NumPy, slow, and sharing nothing with the package.

A stream is a list of updates δ_i = ψ_i − ψ_0, each a dictionary of arrays, with a weight for each. Every function yields the
deployed update Ψ_k − ψ_0 after each arrival. Which tensors are linear weights is told, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

Update = dict[str, np.ndarray]
Steps = Iterator[Update]

RANK_CUT = 1e-6


def each(function: Callable[..., np.ndarray], *updates: Update) -> Update:
    """Apply a function tensor by tensor."""
    return {name: function(*(update[name] for update in updates)) for name in updates[0]}


def norm(update: Update) -> float:
    return float(np.sqrt(sum(np.sum(tensor**2) for tensor in update.values())))


def average(deltas: list[Update], weights: list[float]) -> Steps:
    """Eq. 45, ODE-M: Ψ_k = (1 − η_k)Ψ_{k−1} + η_k ψ_k."""
    merged = deltas[0]
    for k, delta in enumerate(deltas):
        eta = weights[k] / sum(weights[: k + 1])
        merged = each(lambda old, new, e=eta: (1 - e) * old + e * new, merged, delta)
        yield merged


def task_arithmetic_sum(deltas: list[Update], weights: list[float], scaling: float) -> Steps:
    """Eq. 35, OPCM: θ_t = θ_{t−1} + λ(θ^(t) − θ^(0)); a weight counts against the mean of the weights so far."""
    for k in range(1, len(deltas) + 1):
        mean = sum(weights[:k]) / k
        shares = [scaling * w / mean for w in weights[:k]]
        yield each(lambda *ds, s=shares: sum(a * d for a, d in zip(s, ds, strict=True)), *deltas[:k])


def task_arithmetic_mean(deltas: list[Update], weights: list[float], scaling: float) -> Steps:
    """Eq. 48-49, ODE-M: ψ_0 + λ times the recursive weighted mean."""
    for mean in average(deltas, weights):
        yield each(lambda m: scaling * m, mean)


def ties(deltas: list[Update], weights: list[float], form: str, density: float, scaling: float) -> Steps:
    """Eq. 36-38, OPCM (`base`), FusionBench's compounding (`compound`), Eq. 50-53, ODE-M (`mean`)."""
    merged = each(lambda d: scaling * d, deltas[0])
    yield merged
    for k in range(1, len(deltas)):
        if form == "mean":
            eta = weights[k] / sum(weights[: k + 1])
            old_share, new_share = 1 - eta, eta
        else:
            old_share, new_share = 1.0, weights[k] / (sum(weights[:k]) / k)
        old, new = flatten(merged), flatten(deltas[k])
        voted = ties_pair(old_share * trim(old, density), new_share * trim(new, density))
        flat = (old if form == "compound" else 0.0) + scaling * voted
        merged = unflatten(flat, merged)
        yield merged


def trim(flat: np.ndarray, density: float) -> np.ndarray:
    """Keep the int(density·N) entries of largest magnitude, and all that equal the smallest of them."""
    count = int(density * flat.size)
    if count == 0:
        return np.zeros_like(flat)
    threshold = np.sort(np.abs(flat))[::-1][count - 1]
    return np.where(np.abs(flat) >= threshold, flat, 0.0)


def ties_pair(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Elect a sign for each entry by the sum, zero sums by the global majority; add the entries that agree with it."""
    signs = np.sign(old + new)
    majority = 1.0 if signs.sum() >= 0 else -1.0
    signs[signs == 0] = majority
    return np.where(np.sign(old) == signs, old, 0.0) + np.where(np.sign(new) == signs, new, 0.0)


def flatten(update: Update) -> np.ndarray:
    return np.concatenate([tensor.ravel() for tensor in update.values()])


def unflatten(flat: np.ndarray, like: Update) -> Update:
    ends = np.cumsum([tensor.size for tensor in like.values()])[:-1]
    pieces = np.split(flat, ends)
    return {name: piece.reshape(like[name].shape) for name, piece in zip(like, pieces, strict=True)}


def opcm_algorithm1(
    deltas: list[Update], linear: set[str], alpha: float, norms: str, scale: str
) -> Iterator[tuple[Update, float]]:
    """Algorithm 1, OPCM, line by line for uniform utilities, with λ_t beside the update."""
    merged, lam, mean_norm = deltas[0], 1.0, norm(deltas[0])
    yield merged, lam
    for t, delta in enumerate(deltas[1:], 2):
        projected = {n: full_projection(d, merged[n], alpha) if n in linear else d for n, d in delta.items()}
        mean_norm = (t - 1) / t * mean_norm + norm(delta if norms == "raw" else projected) / t
        total = each(lambda m, p, before=lam: before * m + p, merged, projected)
        lam = float(np.sqrt(t)) if scale == "sqrt" else norm(total) / mean_norm
        merged = each(lambda x, by=lam: x / by, total)
        yield merged, lam


def opcm_utilities(
    deltas: list[Update], weights: list[float], linear: set[str], alpha: float, norms: str, scale: str
) -> Iterator[tuple[Update, float]]:
    """Eq. 54-58, ODE-M. A_k of Eq. 57 is a mean where OPCM's λ expects a sum, so λ is that of k·A_k."""
    mean, merged = each(np.zeros_like, deltas[0]), each(np.zeros_like, deltas[0])
    seen = 0.0
    for k, delta in enumerate(deltas, 1):
        eta = weights[k - 1] / sum(weights[:k])
        projected = {
            n: full_projection(d, merged[n], alpha) if n in linear and merged[n].any() else d for n, d in delta.items()
        }
        seen += norm(delta if norms == "raw" else projected)
        mean = each(lambda a, p, e=eta: (1 - e) * a + e * p, mean, projected)
        total = each(lambda a, count=k: count * a, mean)
        lam = float(np.sqrt(k)) if scale == "sqrt" else norm(total) / (seen / k)
        merged = each(lambda x, by=lam: x / by, total)
        yield merged, lam


def full_projection(delta: np.ndarray, merged: np.ndarray, alpha: float) -> np.ndarray:
    """Eq. 9 as FusionBench computes it: both full bases, the diagonal and the leading r×r block set to zero."""
    u, sigma, vt = np.linalg.svd(merged, full_matrices=True)
    coefficients = u.T @ delta @ vt.T
    reached = np.cumsum(sigma)
    rank = int((reached <= alpha * reached[-1]).sum())
    known = int((sigma > RANK_CUT * sigma[0]).sum())
    for i in range(known):
        coefficients[i, i] = 0.0
    coefficients[:rank, :rank] = 0.0
    return u @ coefficients @ vt


def magmax(deltas: list[Update], weights: list[float], scaling: float) -> Steps:
    """The entry of largest magnitude among w_i δ_i, the first of several, against the mean weight."""
    for k in range(1, len(deltas) + 1):
        mean = sum(weights[:k]) / k

        def pick(*tensors: np.ndarray, k: int = k, mean: float = mean) -> np.ndarray:
            stack = np.stack([w * t for w, t in zip(weights[:k], tensors, strict=True)])
            winner = np.abs(stack).argmax(axis=0)
            return scaling / mean * np.take_along_axis(stack, winner[None], axis=0)[0]

        yield each(pick, *deltas[:k])


def iso(deltas: list[Update], weights: list[float], linear: set[str], scaling: float) -> Steps:
    """Iso-C on S = k·Σ w_i δ_i / W_k: a·mean(σ)·U Vᵀ for linear weights, S/k for everything else."""
    for k, mean in enumerate(average(deltas, weights), 1):
        merged = dict(mean)
        for name in linear:
            u, sigma, vt = np.linalg.svd(k * mean[name], full_matrices=False)
            merged[name] = scaling * sigma.mean() * (u @ vt)
        yield merged


def iso_auto(deltas: list[Update], weights: list[float], linear: set[str], base: Update) -> Steps:
    """`iso` with a = min(1.5, max(1.8/k, 0.09·‖ψ_0‖·‖S‖ / Σ‖δ_i‖²)), the sum over i weighed like S itself."""

    def squared(update: Update) -> float:
        return sum(float((update[n] ** 2).sum()) for n in linear)

    for k in range(1, len(deltas) + 1):
        over = list(zip(weights[:k], deltas[:k], strict=True))
        total = {n: k * sum(w * d[n] for w, d in over) / sum(weights[:k]) for n in deltas[0]}
        spread = k * sum(w * squared(d) for w, d in over) / sum(weights[:k])
        a = min(1.5, max(1.8 / k, 0.09 * (squared(base) * squared(total)) ** 0.5 / spread))
        merged = {n: s / k for n, s in total.items()}
        for name in linear:
            u, sigma, vt = np.linalg.svd(total[name], full_matrices=False)
            merged[name] = a * sigma.mean() * (u @ vt)
        yield merged


def dop(deltas: list[Update], weights: list[float], linear: set[str], steps: int, lr: float, alpha: float) -> Steps:
    """Each linear weight descends between the merged and the new one; all other tensors are averaged pairwise."""
    merged = deltas[0]
    yield merged
    for k in range(1, len(deltas)):
        relative = weights[k] / (sum(weights[:k]) / k)
        share = relative / (1 + relative)
        kept = alpha * (1 - share) / (alpha * (1 - share) + (1 - alpha) * share)
        following = {}
        for name, new in deltas[k].items():
            start = (1 - share) * merged[name] + share * new
            if name in linear:
                start = dop_descend(start, merged[name], new, kept, steps, lr)
            following[name] = start
        merged = following
        yield merged


def dop_descend(w: np.ndarray, merged: np.ndarray, new: np.ndarray, kept: float, steps: int, lr: float) -> np.ndarray:
    """Adam (0.9, 0.999, 1e-8) on a·L_merged + (1−a)·L_new, where a follows the min-norm weight, EMA 0.999.

    L_i = ‖Σ_i U_iᵀ(W − W_i)‖² + ‖(W − W_i)V_i Σ_i‖², whose gradient is 2(A(W − W_i) + (W − W_i)B), A = UΣ²Uᵀ, B = VΣ²Vᵀ.
    """
    sides = []
    for target in (merged, new):
        u, sigma, vt = np.linalg.svd(target, full_matrices=False)
        r = int((np.cumsum(sigma) < 0.99999 * sigma.sum()).sum())
        sides.append(((u[:, :r] * sigma[:r] ** 2) @ u[:, :r].T, (vt[:r].T * sigma[:r] ** 2) @ vt[:r]))
    first, second = np.zeros_like(w), np.zeros_like(w)
    for t in range(1, steps + 1):
        losses, grads = [], []
        for (left, right), target in zip(sides, (merged, new), strict=True):
            gap = w - target
            losses.append(float(np.sum(gap * (left @ gap)) + np.sum(gap * (gap @ right))))
            grads.append(2 * (left @ gap + gap @ right))
        a, b = grads[0] / losses[0], grads[1] / losses[1]
        kept = 0.999 * kept + 0.001 * min_norm(a, b)
        grad = kept * grads[0] + (1 - kept) * grads[1]
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * second + 0.001 * grad**2
        w = w - lr * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    return w


def min_norm(a: np.ndarray, b: np.ndarray) -> float:
    """The c in [0, 1] that minimises ‖c·a + (1 − c)·b‖², in the three cases of Désidéri's two-task solution."""
    aa, ab, bb = np.sum(a * a), np.sum(a * b), np.sum(b * b)
    if ab >= aa:
        return 1.0
    if ab >= bb:
        return 0.0
    return float((bb - ab) / (aa + bb - 2 * ab))
