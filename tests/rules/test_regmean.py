"""The rule regmean: the normal equations in float64 on real layer inputs, uniform and weighted, and singular inputs."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from streams import WEIGHTED

import mergeway
from mergeway.bench.suite import load_suite
from mergeway.errors import OptionError


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(tiny.vision_suite(tmp_path_factory.mktemp("regmean") / "suite"))


def layer_inputs(suite, task):
    """The inputs of every linear layer of a task's expert on its training data, caught from the module itself."""
    from transformers import CLIPVisionModelWithProjection

    model = CLIPVisionModelWithProjection.from_pretrained(suite.task(task).expert).eval()
    caught = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, inputs, __, name=name: caught.update({f"{name}.weight": inputs[0]}))
    images = suite.samples(task, "train").inputs["images"]
    with torch.no_grad():
        model(pixel_values=(images.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5)
    return {n: x.reshape(-1, x.shape[-1]).double().numpy() for n, x in caught.items()}


def regmean_oracle(base, experts, inputs, weights, scale):
    """W minimising Σ w_i ‖X_i W − X_i W_i‖²/n_i, the off-diagonal of every Gram matrix scaled; the mean for the rest."""
    made = {}
    for name, start in base.items():
        weighted = [w * e[name] for w, e in zip(weights, experts, strict=True)]
        if name not in inputs[0]:
            made[name] = sum(weighted) / sum(weights)
            continue
        left, right = 0, 0
        for w, e, x in zip(weights, experts, inputs, strict=True):
            gram = x[name].T @ x[name] / len(x[name])
            gram = scale * gram + (1 - scale) * np.diag(np.diag(gram))
            left, right = left + w * gram, right + w * gram @ e[name].T
        made[name] = np.linalg.solve(left, right).T
        assert made[name].shape == start.shape
    return made


@pytest.mark.parametrize("weights", [[1.0] * 3, WEIGHTED[:3]], ids=["uniform", "weighted"])
@pytest.mark.parametrize("scale", [0.9, 0.5])
def test_regmean_solves_the_normal_equations(suite, weights, scale):
    names = [t.name for t in suite.tasks]
    merged = mergeway.merge(
        suite.base,
        [t.expert for t in suite.tasks],
        "regmean",
        weights,
        objective=suite.objective(names, size=1024),
        scale=scale,
    )
    read = [mergeway.merge(suite.base, [t.expert], "average") for t in suite.tasks]
    experts = [{n: t.double().numpy() for n, t in model.items() if t.is_floating_point()} for model in read]
    expected = regmean_oracle(experts[0], experts, [layer_inputs(suite, n) for n in names], weights, scale)
    for name, value in expected.items():
        error = np.linalg.norm(merged[name].double().numpy() - value)
        assert error <= 1e-5 * np.linalg.norm(value), name


def test_a_trunk_gives_what_merge_gives(suite, tmp_path, call):
    call("init", tmp_path / "trunk", "--base", suite.base, "--rule", "regmean").ok()
    for task in suite.tasks:
        call("add", tmp_path / "trunk", task.expert, "--data", f"{suite.path}#{task.name}").ok()
    assert not mergeway.Trunk.open(tmp_path / "trunk").verify()
    deployed = mergeway.Trunk.open(tmp_path / "trunk").params()
    names = [t.name for t in suite.tasks]
    merged = mergeway.merge(
        suite.base, [t.expert for t in suite.tasks], "regmean", objective=suite.objective(names, size=1024)
    )
    assert all(torch.equal(deployed[n], merged[n]) for n in merged)


def test_where_no_input_points_the_mean_is_taken():
    """Inputs that use three of four features: the unused column is the mean, the others the exact solution."""
    from mergeway.core.tensors import Part
    from mergeway.rules import Fold, Regmean

    rng = np.random.default_rng(0)
    x = [rng.standard_normal((20, 4)) * np.array([1, 2, 3, 0]) for _ in range(2)]
    deltas = [rng.standard_normal((5, 4)) for _ in range(2)]
    rule, part = Regmean(scale=1.0), Part("layer.weight", 0, 20, (5, 4))
    at = Fold()
    memory = {s: torch.zeros(rule.slot_shape(s, part.name, (5, 4)), dtype=torch.float64) for s in rule.slots}
    for delta, rows in zip(deltas, x, strict=True):
        at = at.next(1.0)
        memory = rule.fold(at, part, torch.from_numpy(delta), memory, torch.from_numpy(rows.T @ rows))
    got = rule.update(at, part, memory).numpy()
    grams = [rows[:, :3].T @ rows[:, :3] for rows in x]
    solved = np.linalg.solve(sum(grams), sum(g @ d[:, :3].T for g, d in zip(grams, deltas, strict=True))).T
    assert np.allclose(got[:, :3], solved, atol=1e-9)
    assert np.allclose(got[:, 3], (deltas[0] + deltas[1])[:, 3] / 2)


def test_equal_arrivals_come_back_and_data_is_asked_for(suite, tmp_path, call):
    task = suite.tasks[0]
    merged = mergeway.merge(
        suite.base, [task.expert] * 2, "regmean", objective=suite.objective([task.name, suite.tasks[1].name])
    )
    expert = mergeway.merge(suite.base, [task.expert], "average")
    assert all(torch.allclose(merged[n].double(), expert[n].double(), atol=1e-5) for n in merged)
    with pytest.raises(OptionError, match="needs calibration data"):
        mergeway.merge(suite.base, [task.expert], "regmean")
    with pytest.raises(OptionError, match="not a function"):
        mergeway.merge(suite.base, [task.expert], "regmean", objective=lambda params: 0.0)
    call("init", tmp_path / "trunk", "--base", suite.base, "--rule", "regmean").ok()
    assert "--data and --head" in call("add", tmp_path / "trunk", task.expert).mistake()
