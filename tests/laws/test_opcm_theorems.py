"""What the OPCM paper proves, on random streams: Theorems 5.1 and 5.2, and λ ≈ √t for orthogonal updates."""

from __future__ import annotations

import tempfile
from math import sqrt
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lawful import few, save, some, streams, update_of
from safetensors.torch import save_file

import mergeway
from mergeway import Trunk
from mergeway.rules.opcm import project

MATRICES = ("square.weight", "wide.weight", "tall.weight")


@st.composite
def matrix_pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of one shape, either of them of any rank from zero to full."""
    m, n = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1e-4, 1.0, 1e3]))

    def matrix() -> torch.Tensor:
        rank = draw(st.integers(0, min(m, n)))
        left = torch.randn(m, rank, generator=generator, dtype=torch.float64)
        return scale * left @ torch.randn(rank, n, generator=generator, dtype=torch.float64)

    return matrix(), matrix()


@settings(max_examples=150, derandomize=True, deadline=None)
@given(pair=matrix_pairs(), alpha=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
def test_theorem_5_1_projected_update_is_orthogonal_to_the_merged_one(pair, alpha):
    delta, merged = pair
    projected = project(delta, merged, alpha)
    assert abs(float((projected * merged).sum())) <= 1e-9 * float(delta.norm() * merged.norm())
    assert float(projected.norm()) <= (1 + 1e-9) * float(delta.norm())


@some
@given(stream=streams(dtypes=(torch.float32, torch.float64)))
def test_theorem_5_1_along_a_stream(stream):
    """With λ = √t, Eq. 6 gives the projected update back: √t·Δ_t − √(t−1)·Δ_{t−1}."""
    before = None
    for t in range(1, len(stream.arrivals) + 1):
        after = update_of(stream.base, mergeway.merge(stream.base, stream.arrivals[:t], "opcm", scale="sqrt"))
        for name in MATRICES:
            if before is not None:
                added = sqrt(t) * after[name] - sqrt(t - 1) * before[name]
                cosine = float((added * before[name]).sum() / (added.norm() * before[name].norm()))
                assert abs(cosine) <= 1e-5
        before = after


@some
@given(stream=streams(dtypes=(torch.float32, torch.float64)), alpha=st.sampled_from([0.0, 0.5, 1.0]))
def test_theorem_5_2_the_merged_update_is_no_longer_than_the_longest(stream, alpha):
    arrived = [update_of(stream.base, a) for a in stream.arrivals]
    for t in range(1, len(arrived) + 1):
        merged = mergeway.merge(stream.base, stream.arrivals[:t], "opcm", scale="sqrt", alpha=alpha)
        update = update_of(stream.base, merged)
        for name in MATRICES:
            longest = max(float(a[name].norm()) for a in arrived[:t])
            assert float(update[name].norm()) <= (1 + 1e-5) * longest


@some
@given(stream=streams(dtypes=(torch.float32,)))
def test_adaptive_scaling_keeps_the_mean_length(stream):
    """Eq. 10: whatever the directions, the deployed update is as long as the arrivals' are on average."""
    lengths = [whole_length(update_of(stream.base, a)) for a in stream.arrivals]
    merged = update_of(stream.base, mergeway.merge(stream.base, stream.arrivals, "opcm"))
    assert whole_length(merged) == pytest.approx(sum(lengths) / len(lengths), rel=1e-5)


def whole_length(update: dict[str, torch.Tensor]) -> float:
    return sqrt(sum(float(t.norm()) ** 2 for t in update.values()))


@few
@given(seed=st.integers(0, 2**31), side=st.integers(2, 6), count=st.integers(2, 6))
def test_lambda_is_the_root_of_t_on_orthogonal_updates(seed, side, count):
    """Updates in blocks of their own share no direction: nothing is projected away, and λ_t = √t."""
    generator = torch.Generator().manual_seed(seed)
    base = {"w.weight": torch.zeros(side * count, side * count)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_file(base, folder / "base.safetensors")
        trunk = Trunk.create(folder / "trunk", folder / "base.safetensors", "opcm")
        for t in range(1, count + 1):
            update = torch.zeros(side * count, side * count)
            own = slice((t - 1) * side, t * side)
            block = torch.randn(side, side, generator=generator)
            update[own, own] = block / block.norm()
            save_file({"w.weight": update}, folder / f"{t}.safetensors")
            facts = trunk.add(folder / f"{t}.safetensors").details["facts"]
            assert facts["lambda"] == pytest.approx(sqrt(t), rel=1e-6)


@few
@given(stream=streams(dtypes=(torch.float32,)))
def test_first_arrival_is_deployed_as_it_is(stream):
    with tempfile.TemporaryDirectory() as folder:
        base, arrivals = save(Path(folder), stream)
        trunk = Trunk.create(Path(folder) / "trunk", base, "opcm")
        assert trunk.add(arrivals[0]).details["facts"]["lambda"] == pytest.approx(1.0, rel=1e-12)
        for name, tensor in trunk.params().items():
            torch.testing.assert_close(tensor, stream.arrivals[0][name], rtol=0, atol=1e-6)
