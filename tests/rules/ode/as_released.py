"""What ODE-M's released code does, in NumPy and SciPy and its own words: samples in batches, its QP as a least distance problem.

Nothing of mergeway is used or read here. A task is a landscape tilted differently by each of its samples, so that a batch has a
gradient of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from landscapes import SHAPES, Landscape
from scipy.optimize import nnls

ROWS = 128


@dataclass(frozen=True)
class Tilted:
    """L_i(x) = L(x) + a_i·x, one for every sample; any rows of it are a task too."""

    task: str
    land: Landscape
    tilts: np.ndarray

    def __len__(self) -> int:
        return len(self.tilts)

    def rows(self, index: slice | torch.Tensor) -> Tilted:
        return replace(self, tilts=self.tilts[index if isinstance(index, slice) else index.numpy()])

    def loss(self, x: np.ndarray) -> float:
        return self.land.loss(x) + float(self.tilts.mean(0) @ x)

    def gradient(self, x: np.ndarray) -> np.ndarray:
        return self.land.gradient(x) + self.tilts.mean(0)


@dataclass
class TiltedTasks:
    """What a rule may ask of an objective, over such tasks."""

    tasks: list[Tilted]
    shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shares = self.shares or [1 / len(self.tasks)] * len(self.tasks)

    def __call__(self, params: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(s * self._loss(params, t) for s, t in zip(self.shares, self.tasks, strict=True))

    def _loss(self, params: dict[str, torch.Tensor], task: Tilted) -> torch.Tensor:
        x = torch.cat([params[n].reshape(-1) for n in SHAPES])
        return task.land.torch_loss(params) + torch.tensor(task.tilts.mean(0), dtype=x.dtype) @ x

    def task_losses(self, params: dict[str, torch.Tensor]) -> dict[str, float]:
        with torch.no_grad():
            return {t.task: float(self._loss(params, t)) for t in self.tasks}

    def accumulate_task(self, params: dict[str, torch.Tensor], task: Tilted, scale: float = 1.0) -> float:
        loss = self._loss(params, task)
        if loss.requires_grad:
            (scale * loss).backward()
        return float(loss.detach())

    def accumulate(self, params: dict[str, torch.Tensor]) -> float:
        return sum(s * self.accumulate_task(params, t, s) for s, t in zip(self.shares, self.tasks, strict=True))

    def seen(self, *_: object) -> TiltedTasks:
        return self

    def batches(self, *_: object) -> None:
        raise NotImplementedError

    task_data = newest = accumulate_batch = split = taught = softened = precision = batches


def parts(task: Tilted, most: int = 8) -> list[Tilted]:
    cut = [task.rows(slice(i, i + ROWS)) for i in range(0, len(task), ROWS)]
    return cut[:most]


def probe(task: Tilted, x: np.ndarray, most: int = 8) -> float:
    """The mean of the batches' means."""
    return float(np.mean([part.loss(x) for part in parts(task, most)]))


def multipliers(gradients: np.ndarray, excess: np.ndarray, ridge: float = 1e-6) -> np.ndarray:
    """λ ≥ 0 with (GGᵀ + ridge)λ ≥ excess, equal where λ > 0.

    The ridge is a slack for each constraint: in the space of (v, s) with rows (g_j, −√ridge·e_j) it is a plain projection, which
    Lawson and Hanson solve as non-negative least squares.
    """
    rows = np.hstack([gradients, -np.sqrt(ridge) * np.eye(len(gradients))])
    unit = max(np.abs(excess).max(), 1e-30)
    system = np.vstack([rows.T, excess / unit])
    wanted = np.append(np.zeros(rows.shape[1]), 1.0)
    found = nnls(system, wanted, maxiter=10_000)[0]
    rest = wanted - system @ found
    return unit * found / rest[-1]


@dataclass
class Walk:
    """Where the loop ends, how often a step was shortened, how many solutions of the QP were rejected, how many were used."""

    end: np.ndarray
    shortened: int = 0
    rejected: int = 0
    bound: int = 0


def walk(tasks: list[Tilted], until: float, step: float, rho: float = 0.24, p: float = 0.25) -> Walk:
    """The released loop from the first task's start to its target."""
    x0, x1 = tasks[0].land.x0, tasks[0].land.x1
    low = {t.task: (probe(t, x0), probe(t, x1)) for t in tasks}

    def ceiling(task: Tilted, t: float) -> float:
        first, last = low[task.task]
        return first + t * (last - first) + 0.08 * (1 - t) * (1 - t)

    out = Walk(x0.copy())
    grid = [k * step for k in range(10**6) if k * step <= until + 1e-12][-1:]
    for k in range(round(grid[0] / step)):
        t, x = k * step, out.end
        u = (x1 - x) / (1 - t)
        losses = {task.task: probe(task, x) for task in tasks}
        macro = np.zeros_like(x)
        for task in tasks:
            whole = np.sum([part.gradient(x) for part in parts(task)], axis=0)
            macro += whole / np.linalg.norm(whole) ** p
        v0 = u - rho * np.linalg.norm(u) / np.linalg.norm(macro) * macro
        single = {task.task: parts(task)[0].gradient(x) for task in tasks}
        high = sorted(tasks, key=lambda task: losses[task.task] - ceiling(task, t))[::-1][:2]
        rising = sorted((task for task in tasks if single[task.task] @ u > 0), key=lambda task: single[task.task] @ u)
        held = high + [task for task in rising[::-1][:2] if task not in high]
        g = np.stack([single[task.task] for task in held])
        budget = np.array([min((ceiling(task, t + step) - losses[task.task]) / step, 0.0) for task in held])
        excess = g @ v0 - budget
        lam = multipliers(g, excess) if (excess > 1e-6).any() else np.zeros(len(held))
        v = v0 - lam @ g
        if (g @ v - budget > 1e-6).any():
            out.rejected, v = out.rejected + 1, v0
        else:
            out.bound += bool((lam > 0).any())
        for scale in 0.7 ** np.arange(8):
            if all(probe(task, x + scale * step * v) <= ceiling(task, t + step) for task in tasks):
                out.end = x + scale * step * v
                break
            out.shortened += 1
    return out


def refine(
    tasks: list[Tilted], x0: np.ndarray, draws: list[list[np.ndarray]], lr: float
) -> tuple[np.ndarray, list[float]]:
    """AdamW without decay on batches drawn beforehand, with anchor, clip, trust region, tolerance and the best snapshot."""
    x, m, v = x0.copy(), np.zeros_like(x0), np.zeros_like(x0)
    size = x0 @ x0
    before = [probe(task, x0, 4) for task in tasks]
    best, lowest, seen = x0, np.mean(before), [np.mean(before)]
    for number, drawn in enumerate(draws, 1):
        g = np.mean(
            [task.rows(torch.from_numpy(rows)).gradient(x) for task, rows in zip(tasks, drawn, strict=True)], axis=0
        )
        g = g + 2e-3 * (x - x0) / size
        g = g * min(1.0, 1.0 / (np.linalg.norm(g) + 1e-6))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x - lr * (m / (1 - 0.9**number)) / (np.sqrt(v / (1 - 0.999**number)) + 1e-8)
        away = np.linalg.norm(x - x0)
        if away > 1e-3 * np.sqrt(size):
            x = x0 + (x - x0) * (1e-3 * np.sqrt(size) / away)
        now = [probe(task, x, 4) for task in tasks]
        seen.append(np.mean(now))
        if np.mean(now) < lowest and all(a <= b + 0.02 for a, b in zip(now, before, strict=True)):
            best, lowest = x, np.mean(now)
    return best, seen
