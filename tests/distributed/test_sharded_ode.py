"""`ode` on two ranks: the model in rows, the samples shared out, and the path of one rank to rounding."""

from __future__ import annotations

import pytest
import tiny
import torch
import torchrun

import mergeway as mw
from mergeway.suite import load_suite

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["vision", "text"])
def test_two_ranks_follow_the_same_path(tmp_path, kind):
    make = tiny.vision_suite if kind == "vision" else tiny.text_suite
    suite = load_suite(make(tmp_path / "suite"))
    for name in ("one", "two"):
        trunk = mw.Trunk.create(tmp_path / name, suite.base, "ode", guidance=0.5, step=0.1)
        trunk.add(suite.tasks[0].expert, suite.tasks[0].name, data=str(suite.path))
    task = suite.tasks[1]
    one = mw.Trunk.open(tmp_path / "one").add(task.expert, task.name, data=str(suite.path))
    code, _, err = torchrun.finish(
        torchrun.start("add", tmp_path / "two", task.expert, "--task", task.name, "--data", suite.path)
    )
    assert code == 0, err
    trunk = mw.Trunk.open(tmp_path / "two")
    two = trunk.log()[-1]
    ours, theirs = mw.Trunk.open(tmp_path / "one").params(), trunk.params()
    straight = mw.merge(suite.base, [suite.tasks[0].expert, task.expert], "average")
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-5, atol=1e-5)
    # The gradient bends the path, so equality says something of it.
    assert max(float((straight[n] - t).abs().max()) for n, t in ours.items() if t.is_floating_point()) > 1e-3
    assert two.details["trajectory"]["losses"] == pytest.approx(one.details["trajectory"]["losses"], rel=1e-5)
    assert two.details["facts"]["gradients"] == one.details["facts"]["gradients"]
    assert trunk.verify() == []
