"""The rule `steer` against its page's equations in plain NumPy: full SVD, a search by hand, Adam written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from streams import LINEAR, UNIFORM, WEIGHTED, make_stream, relative_error, updates_of

import mergeway as mw
from mergeway.fold.merge import fold_steps
from mergeway.rules.line_search import line_search


def loss_of(targets, weights):
    """A loss with a valley that bends: squared distances to the arrivals, weighed, and a quartic wall."""

    def torch_loss(params):
        total = 0.0
        for target, weight in zip(targets, weights, strict=True):
            for name, value in target.items():
                gap = (params[name] - value) / 0.02
                total = total + weight * (gap.square().mean() + 0.02 * gap.pow(4).mean())
        return total / sum(weights)

    def numpy_loss(params):
        value, grads = 0.0, {name: np.zeros_like(p) for name, p in params.items()}
        for target, weight in zip(targets, weights, strict=True):
            share = weight / sum(weights)
            for name, tensor in target.items():
                gap = (params[name] - tensor.numpy()) / 0.02
                value += share * float((gap**2).mean() + 0.02 * (gap**4).mean())
                grads[name] += share * (2 * gap + 0.08 * gap**3) / gap.size / 0.02
        return value, grads

    return torch_loss, numpy_loss


def best_scale(value) -> float:
    """Powers of 1.6, downhill from 1 until it rises or eight were looked at, then the vertex of the parabola."""
    seen = {0: value(1.0), 1: value(1.6)}
    direction = 1 if seen[1] < seen[0] else -1
    j = 0
    while len(seen) < 8:
        if j + direction not in seen:
            seen[j + direction] = value(1.6 ** (j + direction))
        if seen[j + direction] >= seen[j]:
            break
        j += direction
    if j - 1 in seen and j + 1 in seen:
        a, b, c = seen[j - 1], seen[j], seen[j + 1]
        return 1.6 ** (j + min(max((a - c) / (2 * (a - 2 * b + c)), -0.5), 0.5))
    return 1.6**j


def steer_by_hand(base, deltas, weights, numpy_loss, steps, rate, shrink, carry):
    """The deployed update after the last arrival."""
    taught = {n: np.zeros_like(b) for n, b in base.items()}
    for k in range(2, len(deltas) + 1):
        ground = {n: base[n] + carry * taught[n] for n in base}
        merged, flat = one_merge(ground, deltas[:k], weights[:k], numpy_loss, steps, rate, shrink)
        # What the samples taught is all that the deployed update has beyond the flat one it started with.
        taught = {n: merged[n] - base[n] - flat[n] for n in base}
    return {n: merged[n] - base[n] for n in base}


def one_merge(ground, deltas, weights, numpy_loss, steps, rate, shrink):
    """The deployed model, and the flat update that it started with."""
    k = len(deltas)
    mean = {n: sum(w * d[n] for w, d in zip(weights, deltas, strict=True)) / sum(weights) for n in ground}
    factors = {}
    for name, m in mean.items():
        if name in LINEAR:
            u, sigma, vt = np.linalg.svd(k * m, full_matrices=False)
            factors[name] = (sigma.mean() * u, vt)

    def update(gains):
        return {n: (factors[n][0] * gains[n]) @ factors[n][1] if n in factors else gains[n] * mean[n] for n in ground}

    def model(gains):
        return {n: ground[n] + u for n, u in update(gains).items()}

    def common(c):
        return {n: np.full(len(factors[n][1]) if n in factors else 1, c) for n in ground}

    gains = common(shrink * best_scale(lambda c: numpy_loss(model(common(c)))[0]))
    flat = update(gains)
    first, second = ({n: np.zeros_like(g) for n, g in gains.items()} for _ in range(2))
    for t in range(1, steps + 1):
        _, grads = numpy_loss(model(gains))
        for name, g in grads.items():
            if name in factors:
                u, vt = factors[name]
                slope = np.einsum("ij,ij->j", u, g @ vt.T)
            else:
                slope = np.array([(g * mean[name]).sum()])
            first[name] = 0.9 * first[name] + 0.1 * slope
            second[name] = 0.999 * second[name] + 0.001 * slope**2
            corrected = first[name] / (1 - 0.9**t), second[name] / (1 - 0.999**t)
            gains[name] = gains[name] - rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-12)
    return model(gains), flat


@pytest.mark.parametrize("weights", [UNIFORM, WEIGHTED], ids=["uniform", "weighted"])
@pytest.mark.parametrize(
    "options",
    [{}, {"steps": 3, "rate": 0.3, "shrink": 1.0, "carry": 1.0}, {"steps": 4, "carry": 0.0}, {"steps": 0}],
    ids=str,
)
def test_agrees_with_the_equations(weights, options):
    s = make_stream(11, dtype=torch.float64)
    torch_loss, numpy_loss = loss_of(s.arrivals, weights)
    merged = mw.merge(s.base, s.arrivals, "steer", weights, torch_loss, **options)
    settings = {"steps": 15, "rate": 0.1, "shrink": 0.78, "carry": 0.5} | options
    base = {n: t.numpy() for n, t in s.base.items()}
    expected = steer_by_hand(base, s.deltas, weights, numpy_loss, **settings)
    assert relative_error(updates_of(s.base, merged), expected) < 1e-6


@pytest.mark.parametrize(("carry", "merges"), [(0.5, 2), (0.0, 2)])
def test_takes_as_many_gradients_as_it_says(carry, merges):
    """Fifteen a merge; where nothing is carried on, a stream in one go merges at its end only, which gives the same bits."""
    s = make_stream(12, count=3)
    torch_loss, _ = loss_of(s.arrivals, [1.0] * 3)
    backward = 0

    def counting(params):
        nonlocal backward
        value = torch_loss(params)
        backward += value.requires_grad
        return value

    rule = mw.rules.Steer(carry=carry)
    *_, last = fold_steps(s.base, s.arrivals, rule, objective=counting)
    assert backward == 15 * 2
    whole = mw.merge(s.base, s.arrivals, rule, objective=counting)
    assert backward == 15 * (2 + merges)
    assert all(torch.equal(whole[n], last.params[n]) for n in whole)


@pytest.mark.parametrize("lowest", [0.03, 0.2, 0.9, 1.0, 1.2, 3.0, 30.0])
def test_the_search_finds_the_lowest_scale(lowest):
    found, looks = line_search(lambda c: math.log(c / lowest) ** 2)
    reach = 1.6**6.5
    assert looks <= 8
    assert found == pytest.approx(min(max(lowest, 1 / reach), reach), rel=1e-6 if 1 / reach < lowest < reach else 0.4)


def test_the_search_survives_a_loss_that_explodes():
    found, _ = line_search(lambda c: math.inf if c > 0.5 else (c - 0.2) ** 2)
    assert 0.1 < found < 0.4
