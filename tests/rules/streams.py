"""A stream with every kind of tensor a rule meets: square, wide, tall, 1-D and 4-D, and embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (60, 24),
    "model.class_embedding": (24,),
    "model.patch.weight": (8, 3, 4, 4),
    "model.layers.0.attention.weight": (24, 24),
    "model.layers.0.attention.bias": (24,),
    "model.layers.0.up.weight": (40, 24),
    "model.layers.0.up.bias": (40,),
    "model.layers.0.down.weight": (24, 40),
    "model.layers.0.norm.weight": (24,),
    "head.weight": (10, 24),
}
LINEAR = {
    "model.layers.0.attention.weight",
    "model.layers.0.up.weight",
    "model.layers.0.down.weight",
    "head.weight",
}
# More entries than an elementwise rule is handed at once, and not a multiple of that number.
LARGE: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (530, 500), "model.norm.weight": (24,)}
UNIFORM = [1.0] * 5
WEIGHTED = [1.0, 2.0, 0.5, 3.0, 1.5]


@dataclass(frozen=True)
class Stream:
    """A base and its arrivals as tensors, and the updates δ_i that they hold, exactly, in float64."""

    base: dict[str, Tensor]
    arrivals: list[dict[str, Tensor]]

    @property
    def deltas(self) -> list[dict[str, np.ndarray]]:
        return [updates_of(self.base, arrival) for arrival in self.arrivals]


def updates_of(base: dict[str, Tensor], model: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """ψ − ψ_0 in float64."""
    return {name: (model[name].double() - base[name].double()).numpy() for name in base}


def make_stream(
    seed: int, count: int = 5, dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> Stream:
    """Arrivals that share a part of their updates, as fine-tuned models do, at different strengths."""
    rng = np.random.default_rng(seed)
    base = {name: 0.05 * rng.standard_normal(shape) for name, shape in shapes.items()}
    common = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrivals = []
    for _ in range(count):
        strength = 0.02 * rng.uniform(0.5, 1.5)
        arrivals.append({n: base[n] + strength * (0.4 * common[n] + rng.standard_normal(s)) for n, s in shapes.items()})

    def tensors(model: dict[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array).to(dtype) for name, array in model.items()}

    return Stream(tensors(base), [tensors(arrival) for arrival in arrivals])


def relative_error(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest over the tensors of ‖got − expected‖ / ‖expected‖."""
    assert got.keys() == expected.keys()
    return max(float(np.linalg.norm(got[n] - expected[n]) / np.linalg.norm(expected[n])) for n in expected)
