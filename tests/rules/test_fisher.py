"""The rule fisher: Eq. 4 in plain float64, what it does without moments, and every way moments can be wrong."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from streams import LARGE, UNIFORM, WEIGHTED, make_stream, relative_error, updates_of

import mergeway
from mergeway.bench.suite import load_suite
from mergeway.checkpoint.moments import write_moments
from mergeway.errors import CheckpointError, OptionError


def fisher_oracle(deltas, moments, weights, lam):
    """Eq. 4 with θ written as base + δ; entries where nobody has a moment get the weighted mean.

    A number λ is tilted by the weight against the mean weight before it, so that equal weights give the paper's.
    """
    theta, v, total, made = {}, {}, 0.0, []
    for k, (delta, moment, weight) in enumerate(zip(deltas, moments, weights, strict=True)):
        before, total = total, total + weight
        tilt = weight / (before / k) if k else 1.0
        share = weight / total if lam == "utility" else lam * tilt / (lam * tilt + 1 - lam)
        for n in delta:
            if n not in moment:
                theta[n] = delta[n] if k == 0 else theta[n] * (1 - weight / total) + delta[n] * (weight / total)
                v.setdefault(n, np.zeros_like(delta[n]))
                continue
            if k == 0:
                theta[n], v[n] = delta[n], moment[n]
                continue
            top = share * moment[n] * delta[n] + (1 - share) * v[n] * theta[n]
            bottom = share * moment[n] + (1 - share) * v[n]
            mean = theta[n] * (1 - weight / total) + delta[n] * (weight / total)
            with np.errstate(invalid="ignore"):
                theta[n] = np.where(bottom > 0, top / bottom, mean)
            v[n] = bottom
        made.append(dict(theta))
    return made


def draw_moments(shapes, count, seed=0, without=()):
    """Moments over ten orders of magnitude, a fifth of them zero; some parameters have none at all."""
    rng = np.random.default_rng(seed)
    return [
        {
            n: np.where(rng.random(s) < 0.2, 0.0, 10.0 ** rng.uniform(-16, -6, s)).astype(np.float32)
            for n, s in shapes.items()
            if n not in without
        }
        for _ in range(count)
    ]


def as_tensors(moments):
    return [{n: torch.from_numpy(np.asarray(v)) for n, v in m.items()} for m in moments]


def as_doubles(moments):
    return [{n: v.astype(np.float64) for n, v in m.items()} for m in moments]


@pytest.mark.parametrize("weights", [UNIFORM, WEIGHTED], ids=["uniform", "weighted"])
@pytest.mark.parametrize("lam", [0.4, 0.7, "utility"])
def test_fisher_agrees_with_equation_4(lam, weights):
    stream = make_stream(3)
    shapes = {n: tuple(t.shape) for n, t in stream.base.items()}
    moments = draw_moments(shapes, 5, without={"head.weight", "model.class_embedding"})
    expected = fisher_oracle(stream.deltas, as_doubles(moments), weights, lam)
    for k in (1, 2, 5):
        merged = mergeway.merge(
            stream.base, stream.arrivals[:k], "fisher", weights[:k], moments=as_tensors(moments)[:k], lam=lam
        )
        assert relative_error(updates_of(stream.base, merged), expected[k - 1]) <= 1e-5


def test_a_weight_tilts_lambda_and_equal_weights_do_not():
    stream = make_stream(11, count=2)
    ones = [{n: torch.ones_like(t) for n, t in stream.base.items()}] * 2
    made = {
        w: mergeway.merge(stream.base, stream.arrivals, "fisher", w, moments=ones) for w in ((1, 1), (7, 7), (1, 50))
    }
    assert all(torch.equal(made[1, 1][n], made[7, 7][n]) for n in stream.base)
    for weights, lam in (((1, 1), 0.4), ((1, 50), 0.4 * 50 / (0.4 * 50 + 0.6))):
        expected = {n: (1 - lam) * stream.deltas[0][n] + lam * stream.deltas[1][n] for n in stream.base}
        assert relative_error(updates_of(stream.base, made[weights]), expected) <= 1e-5


def test_a_tensor_larger_than_a_block():
    stream = make_stream(9, shapes=LARGE)
    moments = draw_moments(LARGE, 5)
    merged = mergeway.merge(stream.base, stream.arrivals, "fisher", moments=as_tensors(moments))
    expected = fisher_oracle(stream.deltas, as_doubles(moments), UNIFORM, 0.4)[-1]
    assert relative_error(updates_of(stream.base, merged), expected) <= 1e-5


def test_by_utility_the_order_does_not_matter():
    stream = make_stream(4)
    moments = as_tensors(draw_moments({n: tuple(t.shape) for n, t in stream.base.items()}, 5))
    there = mergeway.merge(stream.base, stream.arrivals, "fisher", WEIGHTED, moments=moments, lam="utility")
    back = mergeway.merge(
        stream.base, stream.arrivals[::-1], "fisher", WEIGHTED[::-1], moments=moments[::-1], lam="utility"
    )
    assert relative_error(updates_of(stream.base, there), updates_of(stream.base, back)) <= 1e-5


def test_equal_moments_and_utilities_give_the_average():
    stream = make_stream(5)
    ones = [{n: torch.full_like(t, 1e-9) for n, t in stream.base.items()}] * 5
    merged = mergeway.merge(stream.base, stream.arrivals, "fisher", WEIGHTED, moments=ones, lam="utility")
    mean = mergeway.merge(stream.base, stream.arrivals, "average", WEIGHTED)
    assert relative_error(updates_of(stream.base, merged), updates_of(stream.base, mean)) <= 1e-5


def test_two_equal_arrivals_are_one_and_the_base_pulls_by_its_moments():
    stream = make_stream(6, count=1)
    moments = as_tensors(draw_moments({n: tuple(t.shape) for n, t in stream.base.items()}, 2))
    once = mergeway.merge(stream.base, stream.arrivals, "fisher", moments=moments[:1])
    twice = mergeway.merge(stream.base, stream.arrivals * 2, "fisher", moments=moments)
    assert all(torch.equal(twice[n], once[n]) for n in once)
    still = [{n: torch.zeros_like(v) for n, v in moments[0].items()}]
    kept = mergeway.merge(stream.base, [*stream.arrivals, stream.base], "fisher", moments=moments[:1] + still)
    for name, v in moments[0].items():
        assert torch.equal(kept[name][v > 0], once[name][v > 0])


def write_stream(folder, stream, moments=None):
    """A model directory for each checkpoint, moments beside the arrivals."""
    paths = []
    for k, tensors in enumerate([stream.base, *stream.arrivals]):
        path = folder / ("base" if k == 0 else f"task{k}")
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        if moments and k:
            write_moments(path / "moments.safetensors", moments[k - 1], step=100 * k, beta2=0.999)
        paths.append(path)
    return paths


def test_moments_beside_the_arrival_are_found_and_a_trunk_gives_the_same_bits(tmp_path, call):
    stream = make_stream(7, count=3)
    moments = as_tensors(draw_moments({n: tuple(t.shape) for n, t in stream.base.items()}, 3))
    base, *arrivals = write_stream(tmp_path, stream, moments)
    expected = mergeway.merge(stream.base, stream.arrivals, "fisher", moments=moments)
    call("merge", base, *arrivals, "--rule", "fisher", "--out", tmp_path / "merged").ok()
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    call("init", tmp_path / "trunk", "--base", base, "--rule", "fisher").ok()
    (tmp_path / "elsewhere").mkdir()
    (arrivals[1] / "moments.safetensors").rename(tmp_path / "elsewhere" / "v.safetensors")
    call("add", tmp_path / "trunk", arrivals[0]).ok()
    assert "--moments FILE" in call("add", tmp_path / "trunk", arrivals[1]).mistake()
    call("add", tmp_path / "trunk", arrivals[1], "--moments", tmp_path / "elsewhere" / "v.safetensors").ok()
    call("add", tmp_path / "trunk", arrivals[2]).ok()
    deployed = mergeway.Trunk.open(tmp_path / "trunk").params()
    for name in stream.base:
        assert torch.equal(merged[name], expected[name])
        assert torch.equal(deployed[name], expected[name])


def test_debias_is_adams_correction(tmp_path):
    stream = make_stream(8, count=2)
    moments = as_tensors(draw_moments({n: tuple(t.shape) for n, t in stream.base.items()}, 2))
    base, *arrivals = write_stream(tmp_path, stream, moments)
    corrected = [
        {n: v / (1 - 0.999**steps) for n, v in m.items()} for m, steps in zip(moments, (100, 200), strict=True)
    ]
    by_hand = mergeway.merge(base, arrivals, "fisher", moments=corrected)
    merged = mergeway.merge(base, arrivals, "fisher", debias=True)
    assert relative_error(updates_of(stream.base, merged), updates_of(stream.base, by_hand)) <= 1e-6
    save_file(moments[0], arrivals[0] / "moments.safetensors")
    with pytest.raises(CheckpointError, match="says no 'step' and 'beta2'"):
        mergeway.merge(base, arrivals, "fisher", debias=True)


def broken(moments, what):
    name = "model.layers.0.up.weight"
    changed = dict(moments)
    if what == "name":
        changed["model.layers.0.uq.weight"] = changed.pop(name)
    elif what == "shape":
        changed[name] = changed[name].mT.contiguous()
    elif what == "negative":
        changed[name] = changed[name] - 1e-3
    elif what in ("nan", "inf"):
        changed[name] = changed[name].clone()
        changed[name][3, 3] = float(what)
    elif what == "integer":
        changed[name] = changed[name].long()
    return {} if what == "empty" else changed


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("name", "'model.layers.0.uq.weight', which the base does not have; did you mean 'model.layers.0.up.weight'"),
        ("shape", "are [24, 40], the parameter is [40, 24]"),
        ("negative", "values that are negative"),
        ("nan", "values that are NaN or infinite"),
        ("inf", "values that are NaN or infinite"),
        ("integer", "have dtype torch.int64"),
        ("empty", "holds no moments"),
    ],
)
def test_bad_moments_are_one_clear_line_and_change_nothing(what, said, tmp_path, call, snapshot):
    stream = make_stream(10, count=1)
    moments = as_tensors(draw_moments({n: tuple(t.shape) for n, t in stream.base.items()}, 1))
    base, arrival = write_stream(tmp_path, stream)
    save_file(broken(moments[0], what), arrival / "moments.safetensors")
    call("init", tmp_path / "trunk", "--base", base, "--rule", "fisher").ok()
    before = snapshot(tmp_path / "trunk" / "steps", tmp_path / "trunk" / "journal.jsonl")
    line = call("add", tmp_path / "trunk", arrival).mistake()
    assert said in line and "moments.safetensors" in line
    assert snapshot(tmp_path / "trunk" / "steps", tmp_path / "trunk" / "journal.jsonl") == before


def test_moments_where_they_are_of_no_use(tmp_path, call):
    base, arrival = write_stream(tmp_path, make_stream(10, count=1))
    call("init", tmp_path / "trunk", "--base", base, "--rule", "average").ok()
    assert "uses no moments" in call("add", tmp_path / "trunk", arrival, "--moments", "v.safetensors").mistake()
    for value, said in (("2", "at most 1"), ("much", "a number or utility"), ("nan", "a finite number or utility")):
        assert (
            said in call("init", tmp_path / "t2", "--base", base, "--rule", "fisher", "--set", f"lam={value}").mistake()
        )


def test_tied_weights_stay_tied_when_only_one_name_has_moments():
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 4, generator=generator)
    base = {"embed_tokens.weight": table, "lm_head.weight": table.clone()}
    arrivals = [{n: t + k * torch.ones_like(t) for n, t in base.items()} for k in (1.0, 2.0)]
    moments = [{"embed_tokens.weight": torch.rand(7, 4, generator=generator)} for _ in arrivals]
    merged = mergeway.merge(base, arrivals, "fisher", moments=moments)
    assert torch.equal(merged["embed_tokens.weight"], merged["lm_head.weight"])
    v = [m["embed_tokens.weight"].double() for m in moments]
    expected = (0.6 * v[0] * 1 + 0.4 * v[1] * 2) / (0.6 * v[0] + 0.4 * v[1])
    assert torch.allclose(merged["lm_head.weight"].double() - table.double(), expected, atol=1e-5)


def test_without_moments_the_data_gives_an_empirical_fisher(tmp_path, call):
    suite = load_suite(tiny.vision_suite(tmp_path / "suite"))
    names = [t.name for t in suite.tasks]
    experts = [t.expert for t in suite.tasks]
    merged = mergeway.merge(suite.base, experts, "fisher", objective=suite.objective(names))
    moments = [tiny.per_sample_fisher(suite, name) for name in names]
    expected = mergeway.merge(suite.base, experts, "fisher", moments=moments)
    for name in expected:
        assert torch.allclose(merged[name], expected[name], atol=1e-5)
    call("init", tmp_path / "trunk", "--base", suite.base, "--rule", "fisher").ok()
    for name in names:
        call("add", tmp_path / "trunk", suite.task(name).expert, "--data", f"{suite.path}#{name}").ok()
    deployed = mergeway.Trunk.open(tmp_path / "trunk").params()
    for name in expected:
        assert torch.allclose(deployed[name], expected[name], atol=1e-5)
    with pytest.raises(OptionError, match="moments"):
        mergeway.merge(suite.base, experts, "fisher")
