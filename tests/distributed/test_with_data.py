"""Rules with data on two ranks: the samples shared out, for `ode` the model in rows, and the result of one rank to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
import torchrun
from safetensors.torch import load_file

import mergeway as mw
from mergeway.bench.suite import load_suite
from mergeway.calibration.memory import Bounds
from mergeway.cli import main

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


def add_on_two(trunk, suite, task, *words):
    """The second arrival folded in by two processes."""
    line = ["add", trunk, task.expert, "--task", task.name, "--data", suite.path, *words]
    code, _, err = torchrun.finish(torchrun.start(*line))
    assert code == 0, err
    return mw.Trunk.open(trunk)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("steer", []),
        ("steer", ["--micro-batch", 5, "--checkpointing"]),
        ("ode:preset=released", ["--checkpointing"]),
    ],
)
def test_two_ranks_deploy_the_same_model(tmp_path, rule, words):
    """A rule that needs the whole model on every rank; one with a last refinement; layers that forget."""
    suite = load_suite(tiny.vision_suite(tmp_path / "suite"))
    name, _, option = rule.partition(":")
    options = {"refine": 3, "step": 0.1} | dict([option.split("=")]) if option else {}
    for folder in ("one", "two"):
        trunk = mw.Trunk.create(tmp_path / folder, suite.base, mw.rules.make(name, options))
        trunk.add(suite.tasks[0].expert, suite.tasks[0].name, data=str(suite.path))
    before = trunk.params()
    task = suite.tasks[1]
    one = mw.Trunk.open(tmp_path / "one")
    one.add(task.expert, task.name, data=str(suite.path))
    two = add_on_two(tmp_path / "two", suite, task, *words)
    assert [r.kind for r in two.log()] == [r.kind for r in one.log()]
    ours, theirs = one.params(), two.params()
    for key, tensor in ours.items():
        torch.testing.assert_close(theirs[key], tensor, rtol=1e-4, atol=2e-5)
    assert any(float((tensor - before[key]).abs().max()) > 1e-3 for key, tensor in ours.items())
    assert two.verify() == []


def test_two_ranks_learn_the_same_without_labels(tmp_path):
    suite = load_suite(tiny.vision_suite(tmp_path / "suite"))
    first, second = suite.tasks[:2]
    for task in (first, second):
        with np.load(task.data) as file:
            np.savez(tmp_path / f"{task.name}.npz", x=file["x_train"])
    rule = mw.rules.Steer(steps=3, most=6, batch=12)
    for folder in ("one", "two"):
        trunk = mw.Trunk.create(tmp_path / folder, suite.base, rule, memory=Bounds(20, copies=2))
        trunk.add(first.expert, first.name, data=tmp_path / f"{first.name}.npz", head=first.head)
    one = mw.Trunk.open(tmp_path / "one")
    one.add(second.expert, second.name, data=tmp_path / f"{second.name}.npz", head=second.head)
    line = ["add", tmp_path / "two", second.expert, "--task", second.name]
    line += ["--data", tmp_path / f"{second.name}.npz", "--head", second.head]
    code, _, err = torchrun.finish(torchrun.start(*line))
    assert code == 0, err
    two = mw.Trunk.open(tmp_path / "two")
    for name, tensor in one.params().items():
        torch.testing.assert_close(two.params()[name], tensor, rtol=1e-5, atol=1e-5)
    assert two.log()[-1].details["losses"] == pytest.approx(one.log()[-1].details["losses"], rel=1e-4)
    # Every rank asks for itself, and hears the same.
    assert [row["answers"] for row in two.memory()["tasks"]] == [30, 30]
    assert two.memory() == one.memory() and two.verify() == []


def test_two_ranks_write_and_learn_the_same(tmp_path):
    """A language model that writes its own samples, read from memory by the second fold."""
    tales = tiny.language_stream(tmp_path / "tales")
    rule = mw.rules.Steer(steps=3, most=6, batch=7)
    for folder in ("one", "two"):
        trunk = mw.Trunk.create(tmp_path / folder, tales / "base", rule, memory=Bounds(14, copies=1, top_k=4))
        trunk.add(tales / "sea")
    one = mw.Trunk.open(tmp_path / "one")
    one.add(tales / "wood", data="self:9")
    code, _, err = torchrun.finish(torchrun.start("add", tmp_path / "two", tales / "wood", "--data", "self:9"))
    assert code == 0, err
    two = mw.Trunk.open(tmp_path / "two")
    for name, tensor in one.params().items():
        torch.testing.assert_close(two.params()[name], tensor, rtol=1e-5, atol=1e-5)
    assert two.log()[-1].details["losses"] == pytest.approx(one.log()[-1].details["losses"], rel=1e-4)
    assert two.log()[-1].details["asked"] == one.log()[-1].details["asked"]
    assert two.memory()["tasks"] == one.memory()["tasks"] and two.verify() == []


@pytest.mark.parametrize(("rule", "ranks"), [("steer", 2), ("steer", 3), ("ode", 2)])
def test_a_stream_in_one_go_is_the_same_on_several_ranks(tmp_path, rule, ranks):
    """Arrivals are asked between folds, through a model that is cut over the ranks already; three do not divide its rows."""
    suite = load_suite(tiny.vision_suite(tmp_path / "suite"))
    for task in suite.tasks:
        with np.load(task.data) as file:
            np.savez(task.data, **{name: file[name] for name in file if name != "y_train"})
    experts = [task.expert for task in suite.tasks]
    options = ["--set", "steps=30", "--set", "batch=12"] if rule == "steer" else ["--set", "step=0.2"]
    words = ["merge", suite.base, *experts, "--rule", rule, "--suite", suite.path, *options]
    assert main([*map(str, words), "--out", str(tmp_path / "one")]) == 0
    code, _, err = torchrun.finish(torchrun.start(*words, "--out", tmp_path / "more", ranks=ranks))
    assert code == 0, err
    one, more = (load_file(tmp_path / side / "model.safetensors") for side in ("one", "more"))
    average = mw.merge(suite.base, experts, "average")
    for name, tensor in one.items():
        torch.testing.assert_close(more[name], tensor, rtol=1e-4, atol=2e-5)
    if rule == "steer":
        assert max(float((average[n] - t).abs().max()) for n, t in one.items() if t.is_floating_point()) > 1e-3


@pytest.mark.parametrize("rule", ["steer", "ode"])
def test_running_means_are_those_of_the_model_on_every_rank(tmp_path, rule):
    """Buffers of floats, which no rank has in rows: an arrival that is asked answers with its own, and so does the merged model."""
    from transformers import ResNetConfig, ResNetForImageClassification

    small = {"embedding_size": 4, "hidden_sizes": [4, 6], "depths": [1, 1], "layer_type": "basic"}
    for seed, name in enumerate(("base", "first", "second")):
        torch.manual_seed(seed)
        model = ResNetForImageClassification(ResNetConfig(num_labels=3, image_size=16, **small))
        for own, buffer in model.named_buffers():
            if "running" in own:
                buffer.copy_(torch.rand_like(buffer) * (1 + seed) + 0.1)
        model.save_pretrained(tmp_path / name)
        pictures = np.random.default_rng(seed).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=pictures)
    options = {"steer": {"steps": 6, "batch": 12}, "ode": {"step": 0.2, "guidance": 0.5}}[rule]
    for side in ("one", "two"):
        trunk = mw.Trunk.create(tmp_path / side, tmp_path / "base", rule, memory=Bounds(32, copies=1), **options)
        trunk.add(tmp_path / "first", data=tmp_path / "first.npz")
    mw.Trunk.open(tmp_path / "one").add(tmp_path / "second", data=tmp_path / "second.npz")
    line = ["add", tmp_path / "two", tmp_path / "second", "--data", tmp_path / "second.npz"]
    code, _, err = torchrun.finish(torchrun.start(*line))
    assert code == 0, err
    one, two = (mw.Trunk.open(tmp_path / side) for side in ("one", "two"))
    assert two.memory() == one.memory()
    if rule == "steer":
        assert two.log()[-1].details["losses"] == pytest.approx(one.log()[-1].details["losses"], rel=1e-4)
    for name, tensor in one.params().items():
        torch.testing.assert_close(two.params()[name], tensor, rtol=1e-4, atol=2e-5)


OWN_RULE = """
from dataclasses import dataclass

import mergeway as mw


@dataclass(frozen=True)
class Nudged(mw.rules.WantsSamples, mw.rules.ModelRule):
    name = "nudged"
    title = "the mean of the arrival and what there was, moved down the loss"
    paper = "none"
    slots = ("model",)

    def merge(self, at, given):
        before = given.state.get("model", given.base)
        model = {n: ((t + before[n]) / 2).requires_grad_() for n, t in given.arrival.items()}
        fit, _ = given.objective.softened(2.0).split()
        for rows in fit.batches(3, 7):
            fit.accumulate_batch(model, rows)
        given.objective.accumulate(model)
        moved = {n: (t if t.grad is None else t - 0.1 * t.grad).detach() for n, t in model.items()}
        return mw.rules.Merged({"model": moved}, moved, dict(given.objective.task_losses(moved)))
"""


def test_a_rule_of_ones_own_has_the_whole_model_on_every_rank(tmp_path):
    """One that does not say that it can do with rows: batches, gradients and losses are those of one process."""
    suite = load_suite(tiny.vision_suite(tmp_path / "suite"))
    (tmp_path / "own.py").write_text(OWN_RULE)
    experts = [task.expert for task in suite.tasks]
    words = ["merge", suite.base, *experts, "--rule", f"{tmp_path / 'own.py'}:Nudged", "--suite", suite.path]
    assert main([*map(str, words), "--out", str(tmp_path / "one")]) == 0
    code, _, err = torchrun.finish(torchrun.start(*words, "--out", tmp_path / "two"))
    assert code == 0, err
    one, two = (load_file(tmp_path / side / "model.safetensors") for side in ("one", "two"))
    last = load_file(experts[-1] / "model.safetensors")
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-5)
    assert max(float((last[n] - t).abs().max()) for n, t in one.items() if t.is_floating_point()) > 1e-3


@pytest.mark.parametrize("rule", ["fisher", "regmean"])
def test_what_an_arrival_brings_is_the_same_on_every_rank(tmp_path, rule):
    """Fisher information and Gram matrices are worked out by each rank for itself, so that the files have the same bits."""
    suite = load_suite(tiny.vision_suite(tmp_path / "suite"))
    experts = [task.expert for task in suite.tasks]
    line = ["merge", suite.base, *experts, "--rule", rule, "--suite", suite.path, "--out", tmp_path / "two"]
    code, _, err = torchrun.finish(torchrun.start(*line))
    assert code == 0, err
    order = [task.name for task in suite.tasks]
    mw.merge_into(tmp_path / "one", suite.base, experts, rule, objective=suite.objective(order))
    one, two = ((tmp_path / side / "model.safetensors").read_bytes() for side in ("one", "two"))
    assert one == two


def test_an_objective_of_ones_own_is_refused(tmp_path):
    suite = load_suite(tiny.vision_suite(tmp_path / "suite"))
    (tmp_path / "own.py").write_text("def loss(params):\n    return sum(p.square().sum() for p in params.values())\n")
    words = ["merge", suite.base, *(t.expert for t in suite.tasks), "--rule", "steer", "--objective", "own:loss"]
    code, _, err = torchrun.finish(torchrun.start(*words, "--out", tmp_path / "out", cwd=tmp_path))
    assert code != 0
    assert "an objective of your own cannot be shared between ranks" in err
    assert not (tmp_path / "out").exists()


def test_every_task_keeps_its_head_on_two_ranks(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    for name, classes in (("base", 2), ("first", 3), ("second", 4)):
        config = ViTConfig(image_size=8, patch_size=4, num_labels=classes, **small)
        ViTForImageClassification(config).save_pretrained(tmp_path / name)
    for rule in ("average", "opcm"):
        trunk = tmp_path / rule
        mw.Trunk.create(trunk, tmp_path / "base", rule)
        for task in ("first", "second"):
            code, _, err = torchrun.finish(torchrun.start("add", trunk, tmp_path / task, "--task", task))
            assert code == 0, err
        assert mw.Trunk.open(trunk).verify() == []
        for task, classes in (("first", 3), ("second", 4)):
            mw.Trunk.open(trunk).export(tmp_path / f"{rule}-{task}", task=task)
            made = ViTForImageClassification.from_pretrained(tmp_path / f"{rule}-{task}")
            assert made.classifier.out_features == classes
