"""`preset=released` is the released code to the letter, against an oracle that shares nothing with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from as_released import Tilted, TiltedTasks, multipliers, refine, walk
from landscapes import vector
from multitask import many

import mergeway as mw
from mergeway.errors import OptionError
from mergeway.rules import make
from mergeway.rules.ode.released import ridge_project
from mergeway.rules.ode.released_refine import refine_as_released

SIZES = (300, 128, 90, 1300, 257)


def tasks_of(seed: int, height: float = 1.0, tilt: float = 0.6) -> list[Tilted]:
    """Five tasks of different numbers of samples, one of them beyond the eight batches that are looked at."""
    rng = np.random.default_rng(seed)
    made = []
    for number, (land, size) in enumerate(zip(many(5, seed), SIZES, strict=True)):
        land.heights[:] *= height
        made.append(Tilted(f"task{number}", land, rng.normal(0, tilt, (size, len(land.x0)))))
    return made


STREAMS = [(seed, height) for seed in range(4) for height in (1.0, 3.0)]


@pytest.mark.parametrize(("seed", "height"), STREAMS)
@pytest.mark.parametrize("until", [0.42, 0.5])
def test_the_loop(seed, height, until):
    tasks = tasks_of(seed, height)
    expected = walk(tasks, until, 0.05)
    ends = tasks[0].land.ends()
    path = mw.trajectory(*ends, TiltedTasks(tasks), until, step=0.05, guidance=0.24, task_norm=0.25, barrier="released")
    assert np.abs(vector(path.end) - expected.end).max() < 1e-6
    assert (path.shortened, path.infeasible) == (expected.shortened, expected.rejected)
    assert path.times[-1] == pytest.approx(0.4 if until == 0.42 else 0.5)


def test_the_loop_was_put_to_work():
    """Among these streams are steps that were shortened, solutions that were used, and solutions that were rejected."""
    walks = [walk(tasks_of(seed, height), 0.42, 0.05) for seed, height in STREAMS]
    assert sum(w.shortened for w in walks) > 0
    assert sum(w.bound for w in walks) > 0
    assert sum(w.rejected for w in walks) > 0


def test_exact_is_something_else():
    """The same streams under preset=exact: nothing is rejected, and the end is another."""
    moved = 0
    for seed, height in STREAMS:
        tasks = tasks_of(seed, height)
        options = {"step": 0.05, "guidance": 0.24, "task_norm": 0.25}
        one, other = (
            mw.trajectory(*tasks[0].land.ends(), TiltedTasks(tasks), 0.4, barrier=b, **options)
            for b in ("released", "per-task")
        )
        assert other.infeasible == 0
        moved += np.abs(vector(one.end) - vector(other.end)).max() > 1e-3
    assert moved >= 4


@pytest.mark.parametrize("seed", range(30))
def test_what_needs_a_multiplier_above_one_is_rejected(seed):
    rng = np.random.default_rng(seed)
    count, size = int(rng.integers(1, 5)), 8
    gradients, v0 = rng.normal(size=(count, size)), rng.normal(size=size) * (0.3 if seed % 2 else 3.0)
    budgets = np.minimum(rng.normal(size=count), 0.0) * (0.3 if seed % 2 else 3.0)
    lam = multipliers(gradients, gradients @ v0 - budgets)
    v = torch.tensor(v0)
    taken = ridge_project(v, [(torch.tensor(g), float(b)) for g, b in zip(gradients, budgets, strict=True)])
    assert taken == (lam.max(initial=0.0) <= 1.0)
    np.testing.assert_allclose(v.numpy(), v0 - lam @ gradients if taken else v0, atol=1e-7)


def test_a_stream_longer_than_its_grid_stands_still():
    """At t = 1/k below h the released loop takes no step at all."""
    tasks = tasks_of(0)
    path = mw.trajectory(*tasks[0].land.ends(), TiltedTasks(tasks), 0.009, step=0.01, barrier="released")
    assert path.until == 0.0 and (vector(path.end) == tasks[0].land.x0).all()


@pytest.mark.parametrize("lr", [1e-6, 3e-5, 1e-2])
def test_the_refinement(lr):
    tasks = tasks_of(1)
    orders = []
    for number, task in enumerate(tasks):
        generator, drawn = torch.Generator().manual_seed(number), []
        while len(drawn) < 30:
            order = torch.randperm(len(task), generator=generator).numpy()
            drawn += [order[i : i + 128] for i in range(0, len(order), 128)]
        orders.append(drawn)
    start, _ = tasks[0].land.ends()
    x0 = tasks[0].land.x0
    # The tensor that is the same at both ends moves here too, but no loss depends on it; its size counts in ‖θ‖.
    still = np.concatenate([x0, np.ones(2)])
    padded = [Padded(task) for task in tasks]
    best, seen = refine(padded, still, [[o[k] for o in orders] for k in range(30)], lr)
    end, told = refine_as_released(start, TiltedTasks(tasks), 30, lr=lr)
    assert told["losses"] == pytest.approx(seen, abs=1e-9)
    np.testing.assert_allclose(vector(end), best[:-2], atol=1e-9)
    assert told["kept"] == min(told["losses"])


class Padded:
    """A task over one vector more, on which its loss does not depend."""

    def __init__(self, task: Tilted) -> None:
        self.inner = task

    def __len__(self) -> int:
        return len(self.inner)

    def rows(self, index):
        return Padded(self.inner.rows(index))

    def loss(self, x):
        return self.inner.loss(x[:-2])

    def gradient(self, x):
        return np.concatenate([self.inner.gradient(x[:-2]), np.zeros(2)])


def test_a_refinement_that_harms_a_task_is_not_kept():
    """One task falls steeply, another rises: the mean is lower, but the second rises by more than 0.02."""
    tasks = tasks_of(2)[:2]
    steep = np.zeros(len(tasks[0].land.x0))
    steep[0] = 1e6
    pair = [Tilted("falls", tasks[0].land, -2 * steep[None]), Tilted("rises", tasks[1].land, steep[None])]
    start, _ = tasks[0].land.ends()
    end, told = refine_as_released(start, TiltedTasks(pair), 5, lr=1e-4)
    assert min(told["losses"][1:]) < told["losses"][0] == told["kept"]
    assert all(torch.equal(end[n], start[n]) for n in start)


def test_the_presets():
    released, exact = (make("ode", {"preset": name}).chosen() for name in ("released", "exact"))
    for rule in (released, exact):
        assert (rule.step, rule.guidance, rule.task_norm, rule.refine) == (0.01, 0.24, 0.25, 80)
    assert (released.barrier, released.refine_by) == ("released", "released")
    assert (exact.barrier, exact.refine_by) == ("per-task", "plain")
    assert make("ode", {"preset": "released", "refine": "5"}).chosen().refine == 5


def test_it_needs_tasks():
    land = many(1)[0]
    with pytest.raises(OptionError, match="barrier=released needs per-task losses"):
        mw.trajectory(*land.ends(), land.torch_loss, 0.5, barrier="released")
    with pytest.raises(OptionError, match="refine_by=released needs per-task losses"):
        refine_as_released(land.ends()[0], land.torch_loss, 1)
    with pytest.raises(OptionError, match="barrier=released goes with solver=euler"):
        make("ode", {"preset": "released", "solver": "heun"})
