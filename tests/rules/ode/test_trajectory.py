"""The trajectory is that of Algorithm 1, its solvers converge as they should, and its edges are defined."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import torch
from landscapes import SHAPES, SIZE, Landscape, algorithm_one, exact_end, hills, named, vector
from safetensors.torch import load_file, save_file

import mergeway as mw
from mergeway.errors import MergewayError, OptionError
from mergeway.rules.ode import operating_time

SEEDS = range(8)
# On these γ is either strictly inside (0, 1) or 0 all the way, so that the field is smooth.
SMOOTH = [1, 2, 4, 5]


def relative(ours: np.ndarray, theirs: np.ndarray, land: Landscape) -> float:
    """The distance of two ends against the way that was travelled."""
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - land.x0))


# --- Algorithm 1 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", SEEDS)
def test_euler_is_algorithm_one(seed, dtype):
    land = hills(seed)
    until, step = 0.73, 0.05
    expected = algorithm_one(land, until, step)
    assert min(expected.gammas) < 1, "the test must have damping on part of the way"
    path = mw.trajectory(*land.ends(dtype), land.torch_loss, until, step=step)
    assert path.end["w"].dtype == dtype
    assert np.abs(vector(path.end) - expected.end).max() <= 1e-5
    assert path.times == pytest.approx([*expected.times, until], abs=1e-12)
    assert path.losses[:-1] == pytest.approx(expected.losses, abs=1e-5)
    assert path.gammas[:-1] == pytest.approx(expected.gammas, abs=2e-5)
    assert path.losses[-1] == pytest.approx(land.loss(expected.end), abs=1e-5)
    assert path.times[-1] == until
    assert path.evaluations == len(expected.times)


def test_the_test_landscapes_have_every_kind_of_damping():
    kinds = {
        "free" if g == 1 else "stopped" if g == 0 else "damped"
        for seed in SEEDS
        for g in algorithm_one(hills(seed), 0.73, 0.05).gammas
    }
    assert kinds == {"free", "stopped", "damped"}


@pytest.mark.parametrize("until", [0.05, 0.1, 0.15, 0.3, 1 / 3, 0.5, 0.7, 0.9999, 1.0])
@pytest.mark.parametrize("step", [0.05, 0.07, 0.3, 1.0])
@pytest.mark.parametrize("solver", ["euler", "heun", "rk4", "adaptive"])
def test_path_ends_where_it_should(solver, until, step):
    land = hills(3)
    path = mw.trajectory(*land.ends(), land.torch_loss, until, solver, step)
    assert path.times[-1] == until
    assert path.times == sorted(set(path.times))
    assert all(torch.isfinite(p).all() for p in path.end.values())
    if solver == "euler":
        assert path.evaluations == int(np.ceil(until / step - 1e-9))
    assert path.losses[-1] == pytest.approx(land.loss(vector(path.end)), abs=1e-9)
    assert path.distances[-1] == pytest.approx(np.linalg.norm(land.x1 - vector(path.end)), abs=1e-9)


@pytest.mark.parametrize("solver", ["euler", "heun", "rk4", "adaptive"])
def test_the_last_step_reaches_the_arrival_but_for_what_is_damped(solver):
    """At t → 1 the step is (θ1 − θ) less its damped part, so only that is left over."""
    land = hills(5)
    path = mw.trajectory(*land.ends(), land.torch_loss, 1.0, solver, 0.01)
    assert path.distances[-1] < 0.1 * path.distances[0]
    free = mw.trajectory(*land.ends(), land.torch_loss, 1.0, solver, 0.01, barrier="none")
    assert np.abs(vector(free.end) - land.x1).max() < 1e-12


# --- solvers against SciPy --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("solver", "tolerance"), [("euler", 4e-2), ("heun", 1e-3), ("rk4", 3e-4)])
def test_solvers_meet_scipy(seed, solver, tolerance):
    land = hills(seed)
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.7, solver, 0.0125)
    assert relative(vector(path.end), exact_end(land, 0.7), land) < tolerance


@pytest.mark.parametrize("seed", SMOOTH)
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("rk4", 4)])
def test_order_of_convergence(seed, solver, order):
    land = hills(seed)
    exact = exact_end(land, 0.6)
    errors = [
        relative(vector(mw.trajectory(*land.ends(), land.torch_loss, 0.6, solver, step).end), exact, land)
        for step in (0.05, 0.025)
    ]
    assert np.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.35)


@pytest.mark.parametrize("solver", ["heun", "rk4"])
def test_stages_cost_their_gradients(solver):
    land = hills(1)
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.5, solver, 0.05)
    assert path.evaluations == 10 * {"heun": 2, "rk4": 4}[solver]


@pytest.mark.parametrize("until", [0.25, 0.5, 0.7])
@pytest.mark.parametrize("seed", SEEDS)
def test_adaptive_is_as_good_as_a_thousand_steps(seed, until):
    """Within 1 % of the way of the h = 10⁻³ Euler end, for a tenth of its gradients."""
    land = hills(seed)
    fine = mw.trajectory(*land.ends(), land.torch_loss, until, "euler", 1e-3)
    path = mw.trajectory(*land.ends(), land.torch_loss, until, "adaptive")
    assert relative(vector(path.end), vector(fine.end), land) <= 0.01
    assert path.evaluations <= fine.evaluations / 10


@pytest.mark.parametrize("seed", [0, 4, 6])
def test_adaptive_follows_its_tolerance(seed):
    land = hills(seed)
    exact = exact_end(land, 0.7)
    loose, tight = (
        mw.trajectory(*land.ends(), land.torch_loss, 0.7, "adaptive", tolerance=tolerance)
        for tolerance in (0.05, 0.002)
    )
    assert loose.evaluations < tight.evaluations
    assert relative(vector(loose.end), exact, land) <= 0.05
    assert relative(vector(tight.end), exact, land) <= 0.002


@pytest.mark.parametrize(
    "options", [{"guidance": 0.24}, {"guidance": 1.0, "certify": True}, {"guidance": 0.24, "barrier": "none"}]
)
def test_adaptive_reaches_its_end_under_guidance(options):
    """Guidance bends the path ever more as t → 1; steps have a shortest length all the same, a five-hundredth of the way."""
    for seed in range(4):
        land = hills(seed)
        path = mw.trajectory(*land.ends(), land.torch_loss, 1.0, "adaptive", **options)
        assert path.times[-1] == 1.0
        assert path.evaluations <= 2 * 500


def test_adaptive_looks_seldom_where_the_path_is_straight():
    land = falling()
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.5, "adaptive")
    assert set(path.gammas) == {1.0}
    assert path.evaluations <= 9
    assert np.abs(vector(path.end) - (land.x0 + land.x1) / 2).max() < 1e-12


# --- edges ------------------------------------------------------------------------------------------------------------


def falling() -> Landscape:
    """A bowl around the arrival: the loss falls all the way."""
    land = hills(0)
    return Landscape(land.x0, land.x1, land.x1, land.centres, 0 * land.heights, land.ripple)


@pytest.mark.parametrize("solver", ["euler", "heun", "rk4", "adaptive"])
def test_without_damping_the_path_is_the_straight_line(solver):
    land = falling()
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.3, solver)
    assert set(path.gammas) == {1.0}
    assert np.abs(vector(path.end) - (land.x0 + 0.3 * (land.x1 - land.x0))).max() < 1e-12
    assert path.certified
    assert path.barrier <= path.bound + 1e-12


@pytest.mark.parametrize("solver", ["euler", "heun", "rk4", "adaptive"])
def test_zero_gradient_leaves_the_transport(solver):
    land = hills(1)

    def flat(params):
        return 0 * params["w"].sum() + 3.0

    path = mw.trajectory(*land.ends(), flat, 0.5, solver)
    assert np.abs(vector(path.end) - (land.x0 + land.x1) / 2).max() < 1e-12
    assert set(path.gammas) == {1.0}
    assert set(path.alignments) == {0.0}


def test_a_loss_that_uses_nothing_that_moves_has_no_gradient():
    land = hills(1)
    path = mw.trajectory(*land.ends(), lambda p: p["still"].sum(), 0.5)
    assert np.abs(vector(path.end) - (land.x0 + land.x1) / 2).max() < 1e-12


def test_an_arrival_equal_to_the_start_changes_nothing():
    land = hills(1)
    start, _ = land.ends()
    path = mw.trajectory(start, {n: t.clone() for n, t in start.items()}, land.torch_loss, 0.5)
    assert all(torch.equal(path.end[n], start[n]) for n in start)
    assert path.evaluations == 0
    assert path.barrier == path.bound == path.rho == path.distance_bound == 0
    assert path.certified
    assert all(torch.equal(path.at(0.25)[n], start[n]) for n in start)


def test_time_zero_keeps_the_start():
    land = hills(1)
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.0)
    assert (vector(path.end) == land.x0).all()
    assert path.losses == pytest.approx([land.loss(land.x0)])
    assert path.distances == pytest.approx([np.linalg.norm(land.x1 - land.x0)])
    assert path.gap == pytest.approx(land.loss(land.x1) - land.loss(land.x0))


def test_a_falling_end_damps_every_rise_to_nothing():
    """ΔL ≤ 0 and an uphill way: γ = 0, and the loss does not rise but for the curvature of a step."""
    land = hills(2)
    assert land.loss(land.x1) < land.loss(land.x0)
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.7, step=0.002)
    assert set(path.gammas) == {0.0}
    assert max(path.losses) - path.losses[0] < 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("solver", ["euler", "heun", "rk4", "adaptive"])
def test_a_loss_that_breaks_on_the_way_names_the_time(solver, bad):
    land = hills(3)
    line = land.x1 - land.x0

    def breaks(params):
        x = torch.cat([params[n].reshape(-1) for n in SHAPES]).detach().double().numpy()
        along = (x - land.x0) @ line / (line @ line)
        return land.torch_loss(params) * (bad if 0.2 < along < 0.9 else 1.0)

    with pytest.raises(MergewayError, match=r"the objective is (nan|inf|-inf) at t = 0\.\d+, evaluation \d+"):
        mw.trajectory(*land.ends(), breaks, 0.8, solver)


def test_a_gradient_that_breaks_names_the_time():
    land = hills(3)

    def kinked(params):
        return land.torch_loss(params) + torch.sqrt(params["b"][0] - params["b"][0].detach())

    with pytest.raises(MergewayError, match=r"gradient of the objective is not finite at t = 0, evaluation 1"):
        mw.trajectory(*land.ends(), kinked, 0.5)


def test_a_loss_that_breaks_at_either_end():
    land = hills(3)
    start, target = land.ends()
    at = {"start": start["w"], "arrival": target["w"]}
    for where, w in at.items():

        def breaks(params, w=w):
            return land.torch_loss(params) + (float("nan") if torch.equal(params["w"].detach(), w) else 0.0)

        with pytest.raises(MergewayError, match="t = 0" if where == "start" else "at the arrival"):
            mw.trajectory(start, target, breaks, 0.5)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda p: p["w"], r"a tensor of shape \[3, 4\]"),
        (lambda p: 1.0, "returned float"),
        (lambda p: None, "returned NoneType"),
    ],
)
def test_an_objective_returns_one_number(loss, said):
    with pytest.raises(MergewayError, match=said):
        mw.trajectory(*hills(0).ends(), loss, 0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"solver": "eular"}, "did you mean 'euler'"),
        ({"until": 1.5}, "until is 1.5"),
        ({"until": float("nan")}, "until is nan"),
        ({"step": 0.0}, "step is 0.0"),
        ({"step": float("inf")}, "step is inf"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"solver": "heun", "certify": True}, "certify needs"),
        ({"solver": "rk4", "barrier": "per-task"}, "per-task goes with"),
        ({"metric": "manhattan"}, "metric"),
        ({"barrier": "high"}, "barrier"),
    ],
)
def test_options_are_checked(options, said):
    land = hills(0)
    with pytest.raises(OptionError, match=said):
        mw.trajectory(*land.ends(), land.torch_loss, **options)


def test_ends_must_fit_each_other():
    land = hills(0)
    start, target = land.ends()
    with pytest.raises(OptionError, match="'b' is only in one"):
        mw.trajectory(start, {n: t for n, t in target.items() if n != "b"}, land.torch_loss)
    with pytest.raises(OptionError, match=r"'b' has shape \[5\] at the start and \[4\]"):
        mw.trajectory(start, target | {"b": target["b"][:4]}, land.torch_loss)


# --- what a trajectory costs and leaves behind ------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["euler", "heun", "rk4", "adaptive"])
def test_frozen_parameters_get_no_gradient_and_inputs_stay(solver):
    land = hills(4)
    start, target = land.ends(torch.float32)
    start["still"].requires_grad_()
    before = [{n: t.detach().clone() for n, t in side.items()} for side in (start, target)]
    asked = []

    def counting(params):
        asked.append({n for n, p in params.items() if p.requires_grad})
        return land.torch_loss(params) + params["still"].sum()

    path = mw.trajectory(start, target, counting, 0.4, solver)
    assert asked
    assert all(names == set(SHAPES) for names in asked)
    assert start["still"].grad is None
    for side, copy in zip((start, target), before, strict=True):
        assert all(torch.equal(side[n], copy[n]) and side[n].grad is None for n in copy)
    assert torch.equal(path.end["still"], start["still"])
    assert torch.equal(path.end["ids"], start["ids"])
    path.end["w"].zero_()
    assert torch.equal(start["w"], before[0]["w"])


def storages(size: int) -> set[int]:
    """The storages of at least `size` bytes that any live tensor has."""
    return {
        t.untyped_storage().data_ptr()
        for t in gc.get_objects()
        if issubclass(type(t), torch.Tensor) and t.untyped_storage().nbytes() >= size
    }


@pytest.mark.parametrize(
    "options", [{}, {"solver": "heun"}, {"solver": "rk4"}, {"solver": "adaptive"}, {"certify": True}]
)
def test_at_most_three_vectors_beyond_theta(options):
    size = 30_000
    generator = torch.Generator().manual_seed(0)
    start, target = ({"w": torch.randn(size, generator=generator)} for _ in range(2))
    curve = torch.rand(size, generator=generator)
    before = storages(4 * size)
    counts = []

    def loss(params):
        # Whatever a solver needs it has by its second step, and looking through all objects is slow.
        if len(counts) < 6:
            counts.append(len(storages(4 * size) - before))
        return (torch.sin(3 * params["w"]) * curve).sum()

    path = mw.trajectory(start, target, loss, 0.5, step=0.1, **options)
    assert min(path.gammas) < 1
    assert max(counts) <= 1 + 3
    # Afterwards only the end is left.
    gc.collect()
    assert len(storages(4 * size) - before) == 1


def test_saved_times_and_times_in_between():
    land = hills(6)
    ends = land.ends()
    path = mw.trajectory(*ends, land.torch_loss, 0.7, step=0.05, save=[0.0, 0.12, 0.5, 0.7, 0.9])
    assert {0.0, 0.12, 0.5, 0.7} <= set(path.times)
    assert (vector(path.at(0.0)) == land.x0).all()
    assert (vector(path.at(0.7)) == vector(path.end)).all()
    for t in (0.12, 0.5):
        index = path.times.index(t)
        assert land.loss(vector(path.at(t))) == pytest.approx(path.losses[index], abs=1e-12)
    # Not saved: integrated again, as a trajectory that ends there.
    shorter = mw.trajectory(*ends, land.torch_loss, 0.33, step=0.05)
    plain = mw.trajectory(*ends, land.torch_loss, 0.7, step=0.05)
    assert (vector(plain.at(0.33)) == vector(shorter.end)).all()
    for bad in (-0.1, 0.8, float("nan")):
        with pytest.raises(OptionError, match=r"integrated from 0 until 0\.7"):
            path.at(bad)


def test_the_end_can_be_saved(tmp_path):
    """The tensors of the end lie side by side in one buffer, which no file format may mind."""
    land = hills(6)
    path = mw.trajectory(*land.ends(torch.float32), land.torch_loss, 0.5)
    save_file(path.end, tmp_path / "end.safetensors")
    again = load_file(tmp_path / "end.safetensors")
    assert all(torch.equal(again[n], path.end[n]) for n in path.end)


def test_summary_is_plain_and_whole():
    land = hills(6)
    path = mw.trajectory(*land.ends(), land.torch_loss, 0.5, save=[0.25])
    told = json.loads(json.dumps(path.summary()))
    assert told["times"] == path.times
    assert told["losses"] == path.losses
    assert told["gammas"] == path.gammas
    assert told["certified"] == path.certified
    assert told["barrier"] == path.barrier
    assert not {"end", "saved"} & set(told)


def test_same_bits_twice():
    land = hills(7)
    ends = land.ends(torch.float32)
    once, twice = (mw.trajectory(*ends, land.torch_loss, 0.6, "adaptive") for _ in range(2))
    assert all(torch.equal(once.end[n], twice.end[n]) for n in once.end)
    assert once.summary() == twice.summary()


def test_half_precision_is_walked_in_float32():
    land = hills(1)
    start, target = ({n: t.bfloat16() if t.is_floating_point() else t for n, t in side.items()} for side in land.ends())
    path = mw.trajectory(start, target, land.torch_loss, 0.5)
    wide = mw.trajectory(
        *({n: t.float() if t.is_floating_point() else t for n, t in side.items()} for side in (start, target)),
        land.torch_loss,
        0.5,
    )
    assert path.end["w"].dtype == torch.float32
    assert all(torch.equal(path.end[n], wide.end[n]) for n in SHAPES)


def test_operating_time():
    assert operating_time(1.0, 4.0) == 0.25
    assert operating_time(2.0, 3.0) == 2 / 3
    assert operating_time(2.0, 3.0, 0.1) == 0.1
    assert operating_time(2.0, 3.0, lambda w, total: (w / total) ** 2) == pytest.approx(4 / 9)
    with pytest.raises(OptionError, match="between 0"):
        operating_time(2.0, 3.0, lambda w, total: w)


def test_sizes_agree():
    assert sum(int(np.prod(s)) for s in SHAPES.values()) == SIZE
    assert (vector(named(np.arange(SIZE, dtype=float))) == np.arange(SIZE)).all()
