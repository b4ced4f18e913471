"""The tangent model: the base at the base, finite differences beside it, and the exact solution of a linear model."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from torch import nn

from mergeway.bench.suite import load_suite
from mergeway.checkpoint import open_checkpoint
from mergeway.model.compute import Compute
from mergeway.model.model import Encoder
from mergeway.model.tangent import Tangent


@pytest.fixture(scope="module", params=["vision", "text"])
def suite(request, tmp_path_factory):
    make = tiny.vision_suite if request.param == "vision" else tiny.text_suite
    return load_suite(make(tmp_path_factory.mktemp(request.param) / "suite"))


def base_of(suite, dtype=torch.float32):
    checkpoint = open_checkpoint(suite.base)
    return {n: checkpoint.read(n).to(dtype) for n, i in checkpoint.infos.items() if i.merges}


def test_at_the_base_it_is_the_base_to_the_bit(suite):
    base, samples = base_of(suite), suite.samples(suite.tasks[0].name, "train")
    tangent = Tangent(suite.model, base)
    with torch.no_grad():
        assert torch.equal(tangent.embed(base, samples.inputs), suite.model.embed(base, samples.inputs))
        plain = suite.model.scale * nn.functional.normalize(suite.model.embed(base, samples.inputs), dim=-1)
        assert torch.equal(tangent(base, samples.inputs, samples.head), plain @ samples.head.mT)


def test_it_moves_as_finite_differences_say(suite):
    base = base_of(suite)
    samples = suite.samples(suite.tasks[0].name, "train").rows(slice(0, 4))
    generator = torch.Generator().manual_seed(0)
    way = {n: torch.randn(t.shape, generator=generator) for n, t in base.items()}
    tangent, h = Tangent(suite.model, base), 1e-3

    def at(step):
        with torch.no_grad():
            return suite.model.embed({n: t + step * way[n] for n, t in base.items()}, samples.inputs).double()

    slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    with torch.no_grad():
        moved = tangent.embed({n: t + way[n] for n, t in base.items()}, samples.inputs).double() - at(0)
    assert float((moved - slope).norm() / slope.norm()) < 5e-3


class _Linear(Encoder):
    """An encoder that is linear in its weight already: its tangent model is itself."""

    scale = 1.0

    def __init__(self):
        self.compute = Compute("cpu")
        self._linear = nn.Linear(5, 3, bias=False)

    @property
    def width(self):
        return 3

    def _family(self):
        raise NotImplementedError

    def embed(self, params, inputs):
        return torch.func.functional_call(self._linear, dict(params), (inputs["x"],))


def test_on_a_linear_model_gradient_descent_reaches_the_exact_solution():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 5)), rng.standard_normal((40, 3))
    exact = np.linalg.lstsq(x, y, rcond=None)[0].T
    base = {"weight": torch.zeros(3, 5)}
    tangent, inputs = Tangent(_Linear(), base), {"x": torch.from_numpy(x).float()}
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
    target = torch.from_numpy(y).float()
    for _ in range(400):
        loss = (tangent.embed({"weight": weight}, inputs) - target).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.005 * gradient).detach().requires_grad_()
    assert np.allclose(weight.detach().numpy(), exact, atol=1e-4)
