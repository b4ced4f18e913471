"""What must not change a single bit: stopping and resuming, shards, threads, and where the tensors come from."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lawful import CASES, bits, few, fold, same_bits, save, save_shards, streams, wanted
from safetensors.torch import load_file

import mergeway
from mergeway import Trunk
from mergeway.fold.merge import fold_steps
from mergeway.rules import RULES, WantsGrams, make


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model directory."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# A trunk takes Gram matrices from data files through a model directory: see tests/fold/test_one_fold.py.
@pytest.mark.parametrize("case", [c for c in CASES if not issubclass(RULES[CASES[c][0]], WantsGrams)])
@settings(few, max_examples=3)
@given(stream=streams())
def test_resumed_is_uninterrupted(case, stream):
    """A trunk that is opened anew for every fold against one merge of the whole stream, after each fold."""
    rule, options = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        base, arrivals = save(Path(folder), stream)
        trunk = Path(folder) / "trunk"
        more = wanted(case, stream.base, len(arrivals))
        Trunk.create(trunk, base, rule, **options)
        for k, (arrival, weight) in enumerate(zip(arrivals, stream.weights, strict=True), 1):
            Trunk.open(trunk).add(arrival, weight=weight, **_of_one(more, k - 1))
            whole = fold(case, stream.base, stream.arrivals[:k], stream.weights[:k])
            assert same_bits(Trunk.open(trunk).params(), whole)


def _of_one(more: dict[str, Any], k: int) -> dict[str, Any]:
    """What the k-th arrival alone takes of what a stream takes."""
    return {name: value[k] if name == "moments" else value for name, value in more.items()}


@pytest.mark.parametrize("case", CASES)
@settings(few, max_examples=2)
@given(stream=streams(longest=3))
def test_a_stream_goes_on_from_any_fold(case, stream):
    """Nothing but the state and the fold's own numbers passes from one fold to the next."""
    rule, options = CASES[case]
    chosen, more = make(rule, options), wanted(case, stream.base, len(stream.arrivals))
    whole = (stream.base, stream.arrivals, chosen, stream.weights)
    steps = list(fold_steps(*whole, **more))
    for step in steps[:-1]:
        *_, last = fold_steps(*whole, **more, after=(step.at, step.state))
        assert same_bits(last.params, steps[-1].params)
    assert same_bits(fold(case, stream.base, stream.arrivals, stream.weights), steps[-1].params)


@pytest.mark.parametrize("case", CASES)
@few
@given(stream=streams(), shards=st.integers(2, 4), size=st.sampled_from([40, 100]))
def test_sharded_is_unsharded(case, stream, shards, size):
    """Shards in, shards out: the tensors are those of a merge in memory."""
    rule, options = CASES[case]
    whole = fold(case, stream.base, stream.arrivals, stream.weights)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = save_shards(folder / "base", stream.base, shards)
        arrivals = [save_shards(folder / f"task{k}", a, k + 1) for k, a in enumerate(stream.arrivals)]
        more = {**wanted(case, stream.base, len(arrivals)), **options, "shard_size": size}
        mergeway.merge_into(folder / "out", base, arrivals, rule, stream.weights, **more)
        assert len(list((folder / "out").glob("*.safetensors"))) > 1
        assert same_bits(load(folder / "out"), whole)


@pytest.mark.parametrize("case", CASES)
@few
@given(stream=streams())
def test_thread_count_does_not_matter(case, stream):
    one, two, three = (fold(case, stream.base, stream.arrivals, stream.weights, threads=n) for n in (1, 2, 3))
    assert same_bits(one, two)
    assert same_bits(one, three)


@pytest.mark.parametrize("case", [c for c in CASES if c != "dop"])
def test_thread_count_does_not_matter_for_tensors_of_real_size(case):
    """Large enough that BLAS, LAPACK and torch would use several threads, and a sum several partial sums, if they were let."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (256, 384), "b.weight": (384, 256), "embed.weight": (1200, 256), "c.weight": (300, 300)}
    base = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    arrivals = [{n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in base.items()} for _ in range(3)]
    before = torch.get_num_threads()
    one = fold(case, base, arrivals, threads=1)
    torch.set_num_threads(2)
    try:
        two = fold(case, base, arrivals, threads=2)
    finally:
        torch.set_num_threads(before)
    assert same_bits(one, two)


@pytest.mark.parametrize("case", CASES)
@few
@given(stream=streams(), threads=st.sampled_from([1, 2]))
def test_inputs_are_never_modified(case, stream, threads):
    models = [stream.base, *stream.arrivals]
    before = [{name: bits(tensor) for name, tensor in model.items()} for model in models]
    merged = fold(case, stream.base, stream.arrivals, stream.weights, threads=threads)
    for tensor in merged.values():
        tensor.fill_(1)
    assert before == [{name: bits(tensor) for name, tensor in model.items()} for model in models]


@pytest.mark.parametrize("case", CASES)
@settings(few, max_examples=2)
@given(stream=streams())
def test_files_are_never_modified(case, stream):
    rule, options = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        base, arrivals = save(Path(folder), stream)
        before = [path.read_bytes() for path in (base, *arrivals)]
        more = {**wanted(case, stream.base, len(arrivals)), **options}
        for tensor in mergeway.merge(base, arrivals, rule, stream.weights, **more).values():
            tensor.fill_(1)
        assert before == [path.read_bytes() for path in (base, *arrivals)]
