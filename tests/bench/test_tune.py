"""Tuning baselines: the number with the lowest KL to the experts, worked out here by hand, is the one that is chosen."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import mergeway as mw
from mergeway.bench.protocol import orders
from mergeway.bench.tune import GRIDS, tune
from mergeway.checkpoint import open_checkpoint
from mergeway.errors import OptionError


def by_hand(suite, order, merged, size, seed):
    """Mean over tasks of the mean KL(expert ‖ merged), in NumPy, on the samples that the objective draws."""
    drawn = suite.objective(list(order), size=size, seed=seed).tasks
    found = []
    for task in drawn:
        expert = open_checkpoint(suite.task(task.task).expert)
        params = {n: expert.read(n) for n in expert.infos}
        with torch.no_grad():
            p, q = (suite.model(m, task.inputs, task.head).double().numpy() for m in (params, merged))
        p, q = (
            x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)
            for x in (p, q)
        )
        found.append((np.exp(p) * (p - q)).sum(1).mean())
    return np.mean(found)


@pytest.mark.parametrize("rule", ["task-arithmetic", "iso"])
def test_the_lowest_divergence_is_chosen(vision, rule):
    [found] = tune(vision, ["average", rule], 24, 2)
    option, values = GRIDS[rule]
    order = orders([t.name for t in vision.tasks], 3)[2]
    arrivals = [vision.task(name).expert for name in order]
    expected = {v: by_hand(vision, order, mw.merge(vision.base, arrivals, rule, **{option: v}), 24, 2) for v in values}
    for value, loss in found.losses.items():
        assert loss == pytest.approx(expected[value], rel=2e-3)  # answers are kept in half precision
    assert found.value == min(expected, key=lambda v: expected[v])
    assert found.text == f"{rule}:{option}={found.value:g}"


def test_every_grid_holds_the_default():
    for rule, (option, values) in GRIDS.items():
        assert mw.rules.make(rule, {}).options()[option] in values


def test_rules_without_a_number_are_refused(vision):
    with pytest.raises(OptionError, match="none of the rules has a number"):
        tune(vision, ["average", "steer"], 24, 0)


def test_bench_adds_a_row_for_each_tuned_rule(vision, call):
    done = call("bench", vision.path, "--rules", "average,iso", "--tune", "--orders", "1", "--samples", "24", "--json")
    assert done.code == 0
    labels = [row["rule"] for row in json.loads(done.out)["rows"]]
    assert labels[:2] == ["average", "iso"] and labels[2].startswith("iso:scaling=")
    assert "KL to the experts" in done.err


def test_copies_reach_the_rule(vision):
    """What a fold learns from is drawn from the copies too, so its losses are others; without any they repeat."""

    def losses(copies):
        run = mw.bench.bench(vision, ["steer:steps=2:most=8"], orders=1, samples=24, copies=copies)
        return [fold.details.get("losses") for folds in run.streams.values() for fold in folds]

    assert losses(0) == losses(0) != losses(3)
