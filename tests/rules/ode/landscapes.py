"""Loss landscapes to walk on, and Algorithm 1 of ODE-M taken literally, in NumPy and float64.

A landscape is a bowl with hills and ripples, so it is not convex; its gradient is written out by hand. `torch_loss` is the
same function over named tensors, for the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.integrate import solve_ivp

# A matrix, a vector and a scalar move; 'still' is the same at both ends and 'ids' is no float.
SHAPES = {"w": (3, 4), "b": (5,), "s": ()}
SIZE = 18


@dataclass(frozen=True)
class Landscape:
    """L(x) = ½κ‖x − m‖² + Σ_j h_j exp(−‖x − c_j‖²/2r²) + a sin(k·x), from x0 to x1."""

    x0: np.ndarray
    x1: np.ndarray
    middle: np.ndarray
    centres: np.ndarray
    heights: np.ndarray
    ripple: np.ndarray
    kappa: float = 0.1
    radius: float = 1.0
    ripples: float = 0.0

    def loss(self, x: np.ndarray) -> float:
        bumps = np.exp(-((x - self.centres) ** 2).sum(1) / (2 * self.radius**2))
        bowl = 0.5 * self.kappa * ((x - self.middle) ** 2).sum()
        return float(bowl + self.heights @ bumps + self.ripples * np.sin(self.ripple @ x))

    def gradient(self, x: np.ndarray) -> np.ndarray:
        away = x - self.centres
        bumps = np.exp(-(away**2).sum(1) / (2 * self.radius**2))
        hills = -(self.heights * bumps) @ away / self.radius**2
        return self.kappa * (x - self.middle) + hills + self.ripples * np.cos(self.ripple @ x) * self.ripple

    def torch_loss(self, params: dict[str, torch.Tensor]) -> torch.Tensor:
        x = torch.cat([params[n].reshape(-1) for n in SHAPES])
        to = {"dtype": x.dtype}
        middle, centres = torch.tensor(self.middle, **to), torch.tensor(self.centres, **to)
        heights, ripple = torch.tensor(self.heights, **to), torch.tensor(self.ripple, **to)
        bumps = torch.exp(-((x - centres) ** 2).sum(1) / (2 * self.radius**2))
        return 0.5 * self.kappa * ((x - middle) ** 2).sum() + heights @ bumps + self.ripples * torch.sin(ripple @ x)

    def ends(self, dtype: torch.dtype = torch.float64) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Both ends as named tensors."""
        return named(self.x0, dtype), named(self.x1, dtype)


def named(x: np.ndarray, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    parts, offset = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        parts[name] = torch.tensor(x[offset : offset + size], dtype=dtype).reshape(shape)
        offset += size
    return {**parts, "still": torch.ones(2, dtype=dtype), "ids": torch.arange(3)}


def vector(params: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([params[n].double().numpy().reshape(-1) for n in SHAPES])


def hills(seed: int, **changes: float) -> Landscape:
    """A random landscape with one hill beside the straight way and others elsewhere."""
    rng = np.random.default_rng(seed)
    x0, x1 = rng.normal(0, 0.5, (2, SIZE))
    on_the_way = x0 + rng.uniform(0.3, 0.7) * (x1 - x0) + rng.normal(0, 0.15, SIZE)
    centres = np.stack([on_the_way, *rng.normal(0, 0.7, (3, SIZE))])
    heights = np.array([rng.uniform(0.8, 2.0), *rng.uniform(-1.0, 1.0, 3)])
    ripple = rng.normal(0, 0.5, SIZE)
    return Landscape(x0, x1, rng.normal(0, 0.5, SIZE), centres, heights, ripple, **{"ripples": 0.1, **changes})


def velocity(land: Landscape, t: float, x: np.ndarray) -> tuple[np.ndarray, float]:
    """Lines 6 to 15 of Algorithm 1: v = u⊥ + γu∥, and γ."""
    g = land.gradient(x)
    u = (land.x1 - x) / (1 - t)
    parallel = (u @ g) / (g @ g) * g
    across = u - parallel
    change = land.loss(land.x1) - land.loss(land.x0)
    gamma = 1.0 if g @ u <= 0 else float(np.clip(change / (g @ u), 0, 1))
    return across + gamma * parallel, gamma


@dataclass(frozen=True)
class Walked:
    """What the literal algorithm saw at the start of each step, and where it came out."""

    times: list[float]
    losses: list[float]
    gammas: list[float]
    end: np.ndarray


def algorithm_one(land: Landscape, until: float, step: float) -> Walked:
    """Algorithm 1 with the last step shortened so that it ends at `until`."""
    x, times, losses, gammas = land.x0.copy(), [], [], []
    count = int(np.ceil(until / step - 1e-9))
    for k in range(count):
        t = k * step
        v, gamma = velocity(land, t, x)
        times.append(t)
        losses.append(land.loss(x))
        gammas.append(gamma)
        x = x + (until - t if k == count - 1 else step) * v
    return Walked(times, losses, gammas, x)


def exact_end(land: Landscape, until: float) -> np.ndarray:
    """θ(until), integrated by SciPy to ten digits."""
    done = solve_ivp(
        lambda t, x: velocity(land, t, x)[0], (0.0, until), land.x0, method="DOP853", rtol=1e-10, atol=1e-12
    )
    assert done.success
    return done.y[:, -1]
