"""OPCM's projection: the thin form is the full one, and λ grows as the authors' code makes it grow."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from safetensors.torch import save_file
from streams import LINEAR, make_stream

from mergeway import Trunk
from mergeway.rules.opcm import project

SHAPES = [(30, 30), (20, 50), (50, 20), (2, 9), (9, 2)]


def low_rank(rng: np.random.Generator, shape: tuple[int, int], rank: int) -> np.ndarray:
    return rng.standard_normal((shape[0], rank)) @ rng.standard_normal((rank, shape[1]))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_thin_projection_is_the_full_one(shape, alpha):
    rng = np.random.default_rng(0)
    merged, delta = rng.standard_normal(shape) + 3 * np.eye(*shape), rng.standard_normal(shape)
    thin = project(torch.from_numpy(delta), torch.from_numpy(merged), alpha).numpy()
    full = oracle.full_projection(delta, merged, alpha)
    assert np.linalg.norm(thin - full) <= 1e-12 * np.linalg.norm(delta)


@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_thin_projection_stands_a_wide_spectrum(condition):
    """The Gram matrix squares the condition number; even so the error stays far below float32's rounding."""
    rng = np.random.default_rng(4)
    u, _, vt = np.linalg.svd(rng.standard_normal((25, 40)), full_matrices=False)
    merged, delta = (u * np.geomspace(1, 1 / condition, 25)) @ vt, rng.standard_normal((25, 40))
    thin = project(torch.from_numpy(delta), torch.from_numpy(merged), 0.5).numpy()
    full = oracle.full_projection(delta, merged, 0.5)
    assert np.linalg.norm(thin - full) <= 1e-15 * condition**2 * np.linalg.norm(delta)


@pytest.mark.parametrize("shape", [(160, 160), (400, 128), (128, 400)])
def test_float32_projection_of_larger_matrices(shape):
    rng = np.random.default_rng(6)
    merged, delta = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    thin = project(torch.from_numpy(delta), torch.from_numpy(merged), 0.5).numpy()
    full = oracle.full_projection(delta.astype(np.float64), merged.astype(np.float64), 0.5)
    assert np.linalg.norm(thin - full) <= 3e-6 * np.linalg.norm(full)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_rank_deficient_projection_leaves_the_null_space_alone(shape, rank):
    """Null vectors pair arbitrarily in a full SVD; with their diagonal kept, the result is defined and the thin one."""
    rng = np.random.default_rng(1)
    merged, delta = low_rank(rng, shape, rank), rng.standard_normal(shape)
    thin = project(torch.from_numpy(delta), torch.from_numpy(merged), 0.5).numpy()
    full = oracle.full_projection(delta, merged, 0.5)
    assert np.linalg.norm(thin - full) <= 1e-9 * np.linalg.norm(full)


def test_float32_projection_keeps_float32_accuracy():
    rng = np.random.default_rng(2)
    merged, delta = rng.standard_normal((40, 60)), rng.standard_normal((40, 60))
    thin = project(torch.from_numpy(delta).float(), torch.from_numpy(merged).float(), 0.5)
    assert thin.dtype is torch.float32
    full = oracle.full_projection(delta, merged, 0.5)
    assert np.linalg.norm(thin.numpy() - full) <= 1e-6 * np.linalg.norm(full)


def test_projecting_on_nothing_changes_nothing():
    delta = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(project(delta, torch.zeros(6, 4), 0.5), delta)


def test_whole_spectrum_leaves_only_what_is_outside_it():
    """With alpha = 1 a square, full-rank merged update leaves nothing of the incoming one."""
    rng = np.random.default_rng(3)
    delta, merged = (torch.from_numpy(rng.standard_normal((12, 12))) for _ in range(2))
    assert float(project(delta, merged, 1.0).norm()) <= 1e-12 * float(delta.norm())


def lambdas(tmp_path, base, arrivals, **options) -> list[float]:
    """λ after each fold, from the journal of a trunk."""
    save_file(base, tmp_path / "base.safetensors")
    trunk = Trunk.create(tmp_path / "trunk", tmp_path / "base.safetensors", "opcm", **options)
    found = []
    for k, arrival in enumerate(arrivals):
        save_file(arrival, tmp_path / f"{k}.safetensors")
        found.append(trunk.add(tmp_path / f"{k}.safetensors").details["facts"]["lambda"])
    return found


def test_lambda_is_that_of_algorithm_1(tmp_path):
    stream = make_stream(4)
    expected = [lam for _, lam in oracle.opcm_algorithm1(stream.deltas, LINEAR, 0.5, "raw", "adaptive")]
    assert lambdas(tmp_path, stream.base, stream.arrivals) == pytest.approx(expected, rel=1e-6)


def test_lambda_of_random_arrivals_has_the_published_values(tmp_path):
    """What the authors' code gives on a random stream of four models: 1, 1.41, 1.72, 1.98, close to √t."""
    rng = np.random.default_rng(5)
    base = {"w.weight": torch.zeros(64, 96), "embed.weight": torch.zeros(400, 64)}
    arrivals = [
        {name: torch.from_numpy(0.01 * rng.standard_normal(t.shape)).float() for name, t in base.items()}
        for _ in range(4)
    ]
    assert lambdas(tmp_path, base, arrivals) == pytest.approx([1.0, 1.41, 1.72, 1.98], abs=0.02)
