"""What must not change a single bit: stopping and resuming, shards, threads, and where the tensors come from."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lawful import RULES, bits, few, same_bits, save, save_shards, streams
from safetensors.torch import load_file

import mergeway
from mergeway import Trunk


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("case", RULES)
@few
@given(stream=streams())
def test_resumed_is_uninterrupted(case, stream):
    """A trunk that is opened anew for every fold against one merge of the whole stream, after each fold."""
    rule, options = RULES[case]
    with tempfile.TemporaryDirectory() as folder:
        base, arrivals = save(Path(folder), stream)
        trunk = Path(folder) / "trunk"
        Trunk.create(trunk, base, rule, **options)
        for k, (arrival, weight) in enumerate(zip(arrivals, stream.weights, strict=True), 1):
            Trunk.open(trunk).add(arrival, weight=weight)
            whole = mergeway.merge(stream.base, stream.arrivals[:k], rule, stream.weights[:k], **options)
            assert same_bits(Trunk.open(trunk).params(), whole)


@pytest.mark.parametrize("case", RULES)
@few
@given(stream=streams(), shards=st.integers(2, 4), size=st.sampled_from([40, 100]))
def test_sharded_is_unsharded(case, stream, shards, size):
    """Shards in, shards out: the tensors are those of a merge in memory."""
    rule, options = RULES[case]
    whole = mergeway.merge(stream.base, stream.arrivals, rule, stream.weights, **options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = save_shards(folder / "base", stream.base, shards)
        arrivals = [save_shards(folder / f"task{k}", a, k + 1) for k, a in enumerate(stream.arrivals)]
        mergeway.merge_into(folder / "out", base, arrivals, rule, stream.weights, shard_size=size, **options)
        assert len(list((folder / "out").glob("*.safetensors"))) > 1
        assert same_bits(load(folder / "out"), whole)


@pytest.mark.parametrize("case", RULES)
@few
@given(stream=streams())
def test_thread_count_does_not_matter(case, stream):
    rule, options = RULES[case]
    one, two, three = (
        mergeway.merge(stream.base, stream.arrivals, rule, stream.weights, threads=n, **options) for n in (1, 2, 3)
    )
    assert same_bits(one, two)
    assert same_bits(one, three)


@pytest.mark.parametrize("case", [c for c in RULES if c != "dop"])
def test_thread_count_does_not_matter_for_tensors_of_real_size(case):
    """Large enough that BLAS, LAPACK and torch would use several threads, and a sum several partial sums, if they were let."""
    rule, options = RULES[case]
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (256, 384), "b.weight": (384, 256), "embed.weight": (1200, 256), "c.weight": (300, 300)}
    base = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    arrivals = [{n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in base.items()} for _ in range(3)]
    before = torch.get_num_threads()
    one = mergeway.merge(base, arrivals, rule, threads=1, **options)
    torch.set_num_threads(2)
    try:
        two = mergeway.merge(base, arrivals, rule, threads=2, **options)
    finally:
        torch.set_num_threads(before)
    assert same_bits(one, two)


@pytest.mark.parametrize("case", RULES)
@few
@given(stream=streams(), threads=st.sampled_from([1, 2]))
def test_inputs_are_never_modified(case, stream, threads):
    rule, options = RULES[case]
    models = [stream.base, *stream.arrivals]
    before = [{name: bits(tensor) for name, tensor in model.items()} for model in models]
    merged = mergeway.merge(stream.base, stream.arrivals, rule, stream.weights, threads=threads, **options)
    for tensor in merged.values():
        tensor.fill_(1)
    assert before == [{name: bits(tensor) for name, tensor in model.items()} for model in models]


@pytest.mark.parametrize("case", ["average", "opcm", "ties base"])
@few
@given(stream=streams())
def test_files_are_never_modified(case, stream):
    rule, options = RULES[case]
    with tempfile.TemporaryDirectory() as folder:
        base, arrivals = save(Path(folder), stream)
        before = [path.read_bytes() for path in (base, *arrivals)]
        for tensor in mergeway.merge(base, arrivals, rule, stream.weights, **options).values():
            tensor.fill_(1)
        assert before == [path.read_bytes() for path in (base, *arrivals)]
