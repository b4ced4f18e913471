"""Alignment: d_t falls, only what is named moves, the stream goes on from it, and it can be rolled back."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny
import torch

import mergeway
from mergeway.bench.suite import load_suite
from mergeway.calibration.alignment import Alignment
from mergeway.errors import OptionError, TrunkError


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(tiny.vision_suite(tmp_path_factory.mktemp("align") / "suite"))


def trunk_of(suite, path, rule, count=2):
    trunk = mergeway.Trunk.create(path, suite.base, rule, keep=5)
    for task in suite.tasks[:count]:
        data = f"{suite.path}#{task.name}" if rule == "fisher" else None
        trunk.add(task.expert, task=task.name, data=data)
    return trunk


def features(suite, params, task):
    from transformers import CLIPVisionModelWithProjection

    model = CLIPVisionModelWithProjection.from_pretrained(suite.base).eval()
    model.load_state_dict(params, strict=False)
    images = suite.samples(task, "train").inputs["images"]
    with torch.no_grad():
        return model(pixel_values=(images.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).image_embeds.double()


@pytest.mark.parametrize("distance", ["mse", "l1"])
def test_the_bias_is_what_the_paper_says_and_falls(distance, suite, tmp_path):
    trunk = trunk_of(suite, tmp_path / "trunk", "fisher")
    old = {n: trunk.deployed(1).read(n).clone() for n in trunk.deployed(1).infos}
    merged = {n: t.clone() for n, t in trunk.params().items()}
    record = trunk.align(f"{suite.path}#bees", how=Alignment(distance=distance, lr=1e-3, epochs=60))
    told, now = record.details["align"], trunk.params()
    goal = features(suite, old, "bees")
    for params, bias in ((merged, told["before"]), (now, told["after"])):
        away = features(suite, params, "bees") - goal
        assert bias == pytest.approx(float(away.norm()) / len(goal), rel=1e-4)
    assert told["after"] < 0.98 * told["before"]
    changed = [n for n in now if not torch.equal(now[n], merged[n])]
    assert changed == ["visual_projection.weight"]
    assert record.kind == "align" and trunk.verify() == []
    trunk.rollback(2)
    assert all(torch.equal(trunk.params()[n], merged[n]) for n in merged)


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_the_steps_are_those_of_adam_on_a_clipped_gradient(clip, suite):
    """By hand, in NumPy: pooled outputs, the gradient of the mean square, its length cut, Adam without decay."""
    from transformers import CLIPVisionModelWithProjection

    from mergeway.calibration.alignment import align

    def tensors(name):
        return CLIPVisionModelWithProjection.from_pretrained(suite.task(name).expert).eval()

    merged, previous = tensors("bees"), tensors("ants")
    pixels = suite.samples("bees", "train").inputs["images"].permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        pooled = merged.vision_model(pixel_values=pixels).pooler_output.double().numpy()
        goal = previous(pixel_values=pixels).image_embeds.double().numpy()
    w = merged.visual_projection.weight.detach().double().numpy()
    m, v, step = np.zeros_like(w), np.zeros_like(w), 0
    for epoch in range(3):
        order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(epoch)).numpy()
        for rows in (order[:10], order[10:20], order[20:]):
            away = pooled[rows] @ w.T - goal[rows]
            g = 2 * away.T @ pooled[rows] / away.size
            g *= min(1.0, clip / (np.linalg.norm(g) + 1e-6))
            step += 1
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            w = w - 0.02 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    how = Alignment(lr=0.02, epochs=3, batch=10, clip=clip)
    models = [{n: p.detach() for n, p in model.named_parameters()} for model in (merged, previous)]
    moved = align(suite.model, *models, suite.samples("bees", "train"), how).moved
    assert list(moved) == ["visual_projection.weight"]
    np.testing.assert_allclose(moved["visual_projection.weight"].numpy(), w, atol=2e-5)


def test_the_released_rate_for_domains_moves_nothing(suite):
    from mergeway.calibration.alignment import align

    models = [
        dict(suite.model.module.named_parameters()),
        {n: p + 0.1 for n, p in suite.model.module.named_parameters()},
    ]
    done = align(suite.model, *models, suite.samples("bees", "train"), Alignment(lr=0.0))
    assert done.before == done.after > 0


@pytest.mark.parametrize("rule", ["fisher", "average"])
def test_the_next_fold_goes_on_from_it_only_if_the_memory_is_the_model(rule, suite, tmp_path):
    last = suite.tasks[2]
    plain = trunk_of(suite, tmp_path / "plain", rule, 3).params()
    trunk = trunk_of(suite, tmp_path / "trunk", rule)
    trunk.align(f"{suite.path}#bees", how=Alignment(lr=1e-2, module="projection"))
    trunk.add(last.expert, task=last.name, data=f"{suite.path}#{last.name}" if rule == "fisher" else None)
    name = "visual_projection.weight"
    assert torch.equal(trunk.params()[name], plain[name]) == (rule == "average")
    assert [f.task for f in trunk.folded()] == ["ants", "bees", "cats"]


def test_when_it_cannot_be_done(suite, tmp_path):
    trunk = trunk_of(suite, tmp_path / "trunk", "average", 1)
    data = f"{suite.path}#ants"
    with pytest.raises(TrunkError, match="second or later arrival"):
        trunk.align(data)
    trunk.add(suite.tasks[1].expert, task="bees")
    with pytest.raises(OptionError, match="no parameter has such a name"):
        trunk.align(data, how=Alignment(module="nothing"))
    with pytest.raises(OptionError, match="mse or l1"):
        Alignment(distance="l3")  # type: ignore[arg-type]
    trunk.align(data)
    with pytest.raises(TrunkError, match="the last record is 'align'"):
        trunk.align(data)


def test_a_base_that_has_moved_is_named(suite, tmp_path, call):
    (tmp_path / "there").mkdir()
    base = shutil.copytree(suite.base, tmp_path / "there" / "base")
    trunk = mergeway.Trunk.create(tmp_path / "trunk", base, "average")
    for task in suite.tasks[:2]:
        trunk.add(task.expert, task=task.name)
    moved = base.rename(tmp_path / "there" / "renamed")
    words = ("align", trunk.path, "--data", f"{suite.path}#{suite.tasks[1].name}")
    assert "name it with --base" in call(*words).mistake()
    assert "has changed since 'init'" in call(*words, "--base", suite.tasks[0].expert).mistake()
    call(*words, "--base", moved).ok()
    assert trunk.log()[-1].kind == "align"


def test_a_killed_alignment_leaves_the_last_commit(suite, tmp_path):
    trunk = trunk_of(suite, tmp_path / "trunk", "average")
    before = {n: t.clone() for n, t in trunk.params().items()}
    words = ["align", str(trunk.path), "--data", f"{suite.path}#bees", "--epochs", "1000000", "--quiet"]
    lock = trunk.path / "lock"
    lock.unlink(missing_ok=True)
    process = subprocess.Popen([sys.executable, "-m", "mergeway", *words])
    while process.poll() is None and not lock.exists():
        time.sleep(0.01)
    time.sleep(1)  # the writer is at work now, and has no end of it in sight
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert all(torch.equal(trunk.params()[n], t) for n, t in before.items())
    assert trunk.verify() == [] and trunk.log()[-1].kind == "add"
    trunk.align(f"{suite.path}#bees")
