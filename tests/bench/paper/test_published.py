"""The baselines of tables as the papers ran them, against App. D of ODE-M written out in NumPy and against OPCM's λ."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from safetensors.numpy import load_file

import mergeway as mw
from mergeway.bench.paper import Study, comparison
from mergeway.bench.paper.published import as_published, note_of
from mergeway.bench.protocol import orders, utilities


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return mw.load_suite(tiny.vision_suite(tmp_path_factory.mktemp("published"), test=120))


def flat(path):
    tensors = load_file(path / "model.safetensors")
    return {n: t.shape for n, t in tensors.items()}, np.concatenate([t.astype(float).ravel() for t in tensors.values()])


def judged(suite, shapes, vector, order, weights):
    """ACC_w of a model given as one vector."""
    parts = np.split(vector, np.cumsum([int(np.prod(s)) for s in shapes.values()])[:-1])
    named = zip(shapes.items(), parts, strict=True)
    params = {n: torch.from_numpy(part.reshape(shape)).float() for (n, shape), part in named}
    reached = suite.accuracies(params, list(order), list(order))
    return sum(w * a for w, a in zip(weights, reached, strict=True)) / sum(weights)


def trimmed(update):
    """The fifth of the entries that is largest."""
    kept = np.sort(np.abs(update))[-int(0.2 * update.size)]
    return np.where(np.abs(update) >= kept, update, 0.0)


def appendix_d(suite, order, weights):
    """Eq. 47-49 and 50-53 with λ = 0.3; the first arrival of TIES is taken whole."""
    shapes, base = flat(suite.base)
    deltas = [flat(suite.task(name).expert)[1] - base for name in order]
    mean = sum(w * d for w, d in zip(weights, deltas, strict=True)) / sum(weights)
    update = 0.3 * deltas[0]
    for k in range(1, len(deltas)):
        eta = weights[k] / sum(weights[: k + 1])
        pair = [(1 - eta) * trimmed(update), eta * trimmed(deltas[k])]
        sign = np.sign(sum(pair))
        sign[sign == 0] = 1.0 if np.sign(sum(pair)).sum() >= 0 else -1.0
        update = 0.3 * sum(np.where(np.sign(part) == sign, part, 0.0) for part in pair)
    return shapes, {"task-arithmetic": base + 0.3 * mean, "ties": base + update}


def test_table_2_is_of_the_forms_of_appendix_d(suite, tmp_path):
    study = Study(suite, tmp_path, ["task-arithmetic", "ties"], [], [3], orders=1)
    made = {row[1]: row[2].mean for row in comparison.weighted(study).rows if row[0] == "ACC_w"}
    (order,), weights = orders([t.name for t in suite.tasks], 1), utilities(3, 0, "random")
    shapes, expected = appendix_d(suite, order, weights)
    assert set(made) == {f"{rule}:form=mean" for rule in expected}
    for rule, vector in expected.items():
        found = judged(suite, shapes, vector, order, weights)
        assert made[f"{rule}:form=mean"] == pytest.approx(found, abs=0.3), rule
        other = study.run([rule], 3, "random").rows()[0]["acc"]
        assert abs(other - found) > 1.0, "the default form would pass as well"


def test_an_option_of_your_own_stays():
    assert as_published(["ties:form=compound", "task-arithmetic:scaling=0.5", "ode"], 20, "random") == {
        "ties:form=compound": "ties:scaling=0.1:form=compound",
        "task-arithmetic:scaling=0.5:form=mean": "task-arithmetic:scaling=0.5:form=mean",
        "ode": "ode",
    }


@pytest.mark.parametrize(("length", "scaling"), [(5, 0.3), (8, 0.3), (14, 0.1), (20, 0.1)])
def test_scaling_by_length(length, scaling):
    """OPCM's λ: 0.3 at 8 tasks, 0.1 at 14 and 20."""
    from mergeway.bench.protocol import parse_rule
    from mergeway.rules import make

    for rule, run in as_published(["task-arithmetic", "ties", "opcm"], length).items():
        made = make(*parse_rule(run)[:2])
        assert rule == "opcm" or made.scaling == scaling
    assert ("0.1 beyond" in note_of(["ties"], [length])) == (scaling == 0.1)
    assert note_of(["ode"], [20]) == note_of(["ties:scaling=0.3"], [20]) == ""
