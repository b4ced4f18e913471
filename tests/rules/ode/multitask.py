"""An objective of several landscapes, one a task, and the step of `preset=exact` in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from landscapes import Landscape, hills
from scipy.optimize import nnls


@dataclass(frozen=True)
class Task:
    task: str
    land: Landscape


class Tasks:
    """What `Objective` offers a rule: the mean loss, the loss of each task, and gradients added to `.grad`."""

    def __init__(self, lands: list[Landscape], weights: list[float] | None = None) -> None:
        weights = weights or [1.0] * len(lands)
        self.tasks = [Task(f"task{k}", land) for k, land in enumerate(lands)]
        self.shares = [w / sum(weights) for w in weights]

    def __call__(self, params: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(s * t.land.torch_loss(params) for s, t in zip(self.shares, self.tasks, strict=True))

    def task_losses(self, params: dict[str, torch.Tensor]) -> dict[str, float]:
        with torch.no_grad():
            return {t.task: float(t.land.torch_loss(params)) for t in self.tasks}

    def accumulate(self, params: dict[str, torch.Tensor]) -> float:
        return sum(s * self.accumulate_task(params, t, s) for s, t in zip(self.shares, self.tasks, strict=True))

    def seen(self, count: int, weights: list[float] | None = None) -> Tasks:
        return self

    def batches(self, *_: object) -> None:
        raise NotImplementedError

    task_data = newest = accumulate_batch = split = softened = precision = batches

    def taught(self, *_: object, **__: object) -> Tasks:
        return self

    def accumulate_task(self, params: dict[str, torch.Tensor], task: Task, scale: float = 1.0) -> float:
        loss = task.land.torch_loss(params)
        (scale * loss).backward()
        return float(loss.detach())


def many(count: int, seed: int = 0, **changes: float) -> list[Landscape]:
    """Landscapes over the same way."""
    first = hills(100 * seed, **changes)
    rest = [hills(100 * seed + k, **changes) for k in range(1, count)]
    return [first, *(replace(land, x0=first.x0, x1=first.x1) for land in rest)]


def nearest(v0: np.ndarray, gradients: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """argmin ½‖v − v0‖² subject to g_j·v ≤ b_j, by SciPy."""
    # Lawson and Hanson's least distance programming: one non-negative least squares.
    system = np.vstack([-gradients.T, gradients @ v0 - budgets])
    wanted = np.append(np.zeros(len(v0)), 1.0)
    rest = system @ nnls(system, wanted)[0] - wanted
    assert np.linalg.norm(rest) > 1e-9, "the constraints contradict each other"
    return v0 - rest[:-1] / rest[-1]


def exact(
    lands: list[Landscape], until: float, step: float, rho: float, p: float, shares: list[float]
) -> tuple[np.ndarray, int]:
    """The loop of `preset=exact`, its QP by SciPy; the end, and how often a step was shortened."""
    x0, x1 = lands[0].x0, lands[0].x1

    def ceiling(land: Landscape, t: float) -> float:
        return (1 - t) * land.loss(x0) + t * land.loss(x1) + 0.08 * (1 - t) ** 2

    x, shortened = x0.copy(), 0
    count = int(np.ceil(until / step - 1e-9))
    for k in range(count):
        t = k * step
        h = until - t if k == count - 1 else step
        u = (x1 - x) / (1 - t)
        gradients = np.stack([land.gradient(x) for land in lands])
        losses = np.array([land.loss(x) for land in lands])
        ceilings = np.array([ceiling(land, t + h) for land in lands])
        g = sum(s * gj / np.linalg.norm(gj) ** p for s, gj in zip(shares, gradients, strict=True))
        v0 = u - rho * np.linalg.norm(u) * g / np.linalg.norm(g)
        excess, rise = losses - ceilings, gradients @ u
        held = set(np.argsort(-excess)[:2]) | {j for j in np.argsort(-rise)[:2] if rise[j] > 0}
        index = sorted(held)
        v = nearest(v0, gradients[index], np.minimum(-excess[index] / h, 0.0))
        scale = 1.0
        for _ in range(8):
            if all(land.loss(x + scale * h * v) <= c for land, c in zip(lands, ceilings, strict=True)):
                break
            scale *= 0.7
            shortened += 1
        else:
            if any(land.loss(x + scale * h * v) > c for land, c in zip(lands, ceilings, strict=True)):
                scale = 0.0
                shortened += 1
        x = x + scale * h * v
    return x, shortened
