"""Each option of the trajectory is its formula: one step of Euler against NumPy, and the loop of `preset=exact` against SciPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from landscapes import SHAPES, hills, vector
from multitask import Tasks, exact, many, nearest

import mergeway as mw
from mergeway.errors import MergewayError, OptionError
from mergeway.rules.ode.barrier import project
from mergeway.rules.ode.refine import RADIUS, refine

STEP = 0.05


def one_step(objective, lands, **options) -> np.ndarray:
    """v at the start, from a path of one Euler step."""
    path = mw.trajectory(*lands[0].ends(), objective, STEP, step=STEP, **options)
    assert path.evaluations == 1
    return (vector(path.end) - lands[0].x0) / STEP


def split(x: np.ndarray) -> list[np.ndarray]:
    sizes = [int(np.prod(s)) for s in SHAPES.values()]
    return np.split(x, np.cumsum(sizes)[:-1])


def rectified(u, g, d, gap, rho=0.0):
    """v = u − (1 − γ)⟨u, g⟩/⟨d, g⟩·d − ρ‖u‖·d/‖d‖."""
    gamma = 1.0 if u @ g <= 0 else np.clip(gap / (u @ g), 0, 1)
    return u - (1 - gamma) * (u @ g) / (d @ g) * d - rho * np.linalg.norm(u) * d / np.linalg.norm(d), gamma


def gap_of(land):
    return land.loss(land.x1) - land.loss(land.x0)


@pytest.mark.parametrize("rho", [0.0, 0.24, 1.0])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_guidance(seed, rho):
    land = hills(seed)
    u, g = land.x1 - land.x0, land.gradient(land.x0)
    expected, gamma = rectified(u, g, g, gap_of(land), rho)
    assert gamma < 1
    assert one_step(land.torch_loss, [land], guidance=rho) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("rho", [0.0, 0.3])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_layer_metric(seed, rho):
    """Each tensor's gradient is scaled to the length of that tensor's way."""
    land = hills(seed)
    u, g = land.x1 - land.x0, land.gradient(land.x0)
    d = np.concatenate(
        [gi * np.linalg.norm(ui) / np.linalg.norm(gi) for ui, gi in zip(split(u), split(g), strict=True)]
    )
    expected, gamma = rectified(u, g, d, gap_of(land), rho)
    assert gamma < 1
    assert one_step(land.torch_loss, [land], metric="layer", guidance=rho) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 2.0]])
def test_diagonal_metric(weights):
    """d = g/(√s + 0.1·√mean(s)) with s the mean of the tasks' squared gradients."""
    lands = many(3, seed=2)
    tasks = Tasks(lands, weights)
    gradients = np.stack([land.gradient(land.x0) for land in lands])
    g = np.array(tasks.shares) @ gradients
    s = (gradients**2).mean(0)
    d = g / (np.sqrt(s) + 0.1 * np.sqrt(s.mean()))
    u = lands[0].x1 - lands[0].x0
    gap = sum(share * gap_of(land) for share, land in zip(tasks.shares, lands, strict=True))
    expected, gamma = rectified(u, g, d, gap, 0.3)
    assert gamma < 1
    assert one_step(tasks, lands, metric="diagonal", guidance=0.3) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("metric", ["layer", "diagonal"])
def test_a_metric_keeps_what_the_field_promises(metric):
    """⟨g, v⟩ ≤ max(ΔL, 0) whatever the metric: the damping is measured along d, so the loss rises no faster."""
    lands = many(3, seed=1)
    tasks = Tasks(lands)
    g = np.mean([land.gradient(land.x0) for land in lands], axis=0)
    v = one_step(tasks, lands, metric=metric)
    assert g @ v <= max(np.mean([gap_of(land) for land in lands]), 0) + 1e-10


@pytest.mark.parametrize("p", [0.25, 1.0])
def test_task_norm(p):
    lands, weights = many(3, seed=3), [1.0, 2.0, 5.0]
    tasks = Tasks(lands, weights)
    g = sum(
        share * gj / np.linalg.norm(gj) ** p
        for share, gj in zip(tasks.shares, (land.gradient(land.x0) for land in lands), strict=True)
    )
    u = lands[0].x1 - lands[0].x0
    gap = sum(share * gap_of(land) for share, land in zip(tasks.shares, lands, strict=True))
    expected, _ = rectified(u, g, g, gap, 0.24)
    assert one_step(tasks, lands, task_norm=p, guidance=0.24) == pytest.approx(expected, abs=1e-10)


def test_task_norm_of_a_task_without_gradient():
    lands = many(2, seed=3)
    lands[1] = hills(7, kappa=0.0, ripples=0.0)
    lands[1].heights[:] = 0
    v = one_step(Tasks(lands), lands, task_norm=0.25, guidance=0.24)
    assert np.isfinite(v).all()


@pytest.mark.parametrize("rho", [0.0, 0.24])
def test_no_barrier_is_transport_and_guidance(rho):
    land = hills(2)
    u, g = land.x1 - land.x0, land.gradient(land.x0)
    expected = u - rho * np.linalg.norm(u) * g / np.linalg.norm(g)
    assert one_step(land.torch_loss, [land], barrier="none", guidance=rho) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("options", [{"task_norm": 0.25}, {"metric": "diagonal"}, {"barrier": "per-task"}])
def test_per_task_options_need_per_task_losses(options):
    land = hills(0)
    with pytest.raises(OptionError, match=r"per-task (gradients|losses)"):
        mw.trajectory(*land.ends(), land.torch_loss, 0.5, **options)


# --- the barrier of each task -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_exact_loop(seed):
    lands, weights = many(5, seed), [1.0, 2.0, 0.5, 1.0, 1.5]
    tasks = Tasks(lands, weights)
    path = mw.trajectory(*lands[0].ends(), tasks, 0.42, step=0.05, guidance=0.24, task_norm=0.25, barrier="per-task")
    expected, shortened = exact(lands, 0.42, 0.05, 0.24, 0.25, tasks.shares)
    assert np.abs(vector(path.end) - expected).max() < 1e-5
    assert path.shortened == shortened
    assert path.infeasible == 0
    assert path.times[-1] == 0.42
    assert set(path.gammas) == {1.0}


def test_the_exact_loop_was_put_to_work():
    """Among the streams above are constraints that bind and steps that were shortened."""
    moved = shortened = 0
    for seed in range(6):
        lands = many(5, seed)
        options = {"step": 0.05, "guidance": 0.24, "task_norm": 0.25}
        held = mw.trajectory(*lands[0].ends(), Tasks(lands), 0.42, barrier="per-task", **options)
        free = mw.trajectory(*lands[0].ends(), Tasks(lands), 0.42, barrier="none", **options)
        moved += np.abs(vector(held.end) - vector(free.end)).max() > 1e-3
        shortened += held.shortened
    assert moved >= 2
    assert shortened > 0


def test_the_halves_of_the_barrier():
    """Constraints move v and shorten nothing; backtracking takes v0 and shortens it, as NumPy does with the constraints left out."""
    lands = many(5, 1)
    for land in lands:
        land.heights[:] *= 3
    options = {"step": 0.05, "guidance": 0.24, "task_norm": 0.25}
    paths = {
        barrier: mw.trajectory(*lands[0].ends(), Tasks(lands), 0.42, barrier=barrier, **options)
        for barrier in ("none", "constraints", "backtracking", "per-task")
    }
    assert paths["constraints"].shortened == 0 < paths["backtracking"].shortened
    ends = {barrier: vector(path.end) for barrier, path in paths.items()}
    assert np.abs(ends["constraints"] - ends["none"]).max() > 1e-3
    x0, x1 = lands[0].x0, lands[0].x1
    x = x0
    for k in range(9):
        t = 0.05 * k
        h = min(0.05, 0.42 - t)
        u = (x1 - x) / (1 - t)
        g = sum(land.gradient(x) / np.linalg.norm(land.gradient(x)) ** 0.25 for land in lands)
        v = u - 0.24 * np.linalg.norm(u) * g / np.linalg.norm(g)
        t += h
        top = [(1 - t) * land.loss(x0) + t * land.loss(x1) + 0.08 * (1 - t) ** 2 for land in lands]
        fitting = [
            s for s in 0.7 ** np.arange(9) if all(la.loss(x + s * h * v) <= c for la, c in zip(lands, top, strict=True))
        ]
        x = x + max(fitting, default=0.0) * h * v
    assert np.abs(ends["backtracking"] - x).max() < 1e-6


def test_at_works_with_the_released_barrier():
    lands = many(3)
    options = {"step": 0.05, "guidance": 0.24, "barrier": "per-task"}
    path = mw.trajectory(*lands[0].ends(), Tasks(lands), 0.4, save=[0.2], **options)
    half = mw.trajectory(*lands[0].ends(), Tasks(lands), 0.2, **options)
    plain = mw.trajectory(*lands[0].ends(), Tasks(lands), 0.4, **options)
    assert np.abs(vector(path.at(0.2)) - vector(half.end)).max() < 1e-12
    assert (vector(plain.at(0.2)) == vector(half.end)).all()


def test_contradicting_tasks_are_reported():
    """Two tasks whose gradients are opposite and that are both above their ceilings: nothing satisfies both."""

    class Contradiction(Tasks):
        def __init__(self) -> None:
            super().__init__(many(2))

        def accumulate_task(self, params, task, scale=1.0):
            sign = 1.0 if task.task == "task0" else -1.0
            loss = sign * params["w"][0, 0] - 3 * params["w"][0, 1] ** 2
            (scale * loss).backward()
            return float(loss.detach())

        def task_losses(self, params):
            w = params["w"].detach()
            return {f"task{k}": float(s * w[0, 0] - 3 * w[0, 1] ** 2) for k, s in enumerate((1.0, -1.0))}

        def __call__(self, params):
            return -3 * params["w"][0, 1] ** 2

    start = {"w": torch.zeros(1, 2, dtype=torch.float64)}
    target = {"w": torch.tensor([[0.0, 2.0]], dtype=torch.float64)}
    path = mw.trajectory(start, target, Contradiction(), 0.05, step=0.05, barrier="per-task")
    assert path.infeasible == 1
    assert path.summary()["infeasible"] == 1


@pytest.mark.parametrize("seed", range(40))
def test_the_constraints_are_solved_exactly(seed):
    rng = np.random.default_rng(seed)
    count, size = int(rng.integers(1, 5)), 6
    gradients, v0 = rng.normal(size=(count, size)), rng.normal(size=size)
    budgets = np.minimum(rng.normal(size=count), 0.0)
    v = torch.tensor(v0)
    assert project(v, [(torch.tensor(g), float(b)) for g, b in zip(gradients, budgets, strict=True)])
    assert v.numpy() == pytest.approx(nearest(v0, gradients, budgets), abs=1e-6)
    assert (gradients @ v.numpy() <= budgets + 1e-8).all()


def test_repeated_constraints_are_no_contradiction():
    g, v = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    assert project(v, [(g, -1.0), (g.clone(), -2.0), (2 * g, 0.0), (torch.zeros_like(g), 0.0)])
    assert v.tolist() == pytest.approx([-2.0, 1.0])


def test_contradictions_leave_the_velocity_alone():
    g, v = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.5, 1.0], dtype=torch.float64)
    assert not project(v, [(g, -1.0), (-g, -1.0)])
    assert v.tolist() == [0.5, 1.0]


def test_a_task_that_breaks_is_an_error():
    lands = many(2)

    class Breaks(Tasks):
        def accumulate_task(self, params, task, scale=1.0):
            return super().accumulate_task(params, task, scale) * float("nan")

    with pytest.raises(MergewayError, match="the objective is nan at t = 0"):
        mw.trajectory(*lands[0].ends(), Breaks(lands), 0.3, barrier="per-task")


# --- the released refinement ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr", "stopped"), [(1e-6, False), (1e-2, True)])
def test_refinement_stays_in_its_region(lr, stopped):
    land = hills(3)
    start, _ = land.ends()
    before = {n: t.clone() for n, t in start.items()}
    end, told = refine(start, land.torch_loss, 20, lr=lr)
    moving = [n for n in start if start[n].is_floating_point()]
    norm = np.sqrt(sum(float(start[n].square().sum()) for n in moving))
    moved = np.sqrt(sum(float((end[n] - start[n]).square().sum()) for n in moving))
    assert told["radius"] == pytest.approx(RADIUS * norm)
    assert 0 < moved <= told["radius"] * (1 + 1e-9)
    assert (moved == pytest.approx(told["radius"])) == stopped
    assert len(told["losses"]) == 21
    assert told["losses"][-1] < told["losses"][0]
    assert told["losses"][-1] == pytest.approx(land.loss(vector(end)))
    assert all(torch.equal(start[n], before[n]) for n in before)
    assert torch.equal(end["ids"], start["ids"])


def test_refinement_takes_the_steps_of_adamw():
    land = hills(3)
    start, _ = land.ends()
    leaves = {n: t.clone().requires_grad_() for n, t in start.items() if t.is_floating_point()}
    adam = torch.optim.AdamW(leaves.values(), lr=1e-6)
    for _ in range(5):
        adam.zero_grad()
        land.torch_loss(leaves).backward()
        leaves["still"].grad = torch.zeros(2, dtype=torch.float64)
        adam.step()
    end, _ = refine(start, land.torch_loss, 5)
    for name in leaves:
        assert torch.allclose(end[name], leaves[name].detach(), atol=1e-12, rtol=0)


def test_every_pair_of_options_walks():
    """Options that go together end where they should."""
    lands = many(3)
    for metric, barrier, solver in itertools.product(
        ["euclidean", "layer", "diagonal"], ["none", "path"], ["euler", "heun", "rk4", "adaptive"]
    ):
        path = mw.trajectory(
            *lands[0].ends(),
            Tasks(lands),
            0.3,
            solver,
            0.1,
            metric=metric,
            barrier=barrier,
            guidance=0.1,
            task_norm=0.25,
        )
        assert path.times[-1] == 0.3
        assert np.isfinite(vector(path.end)).all()
