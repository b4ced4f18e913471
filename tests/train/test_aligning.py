"""Alignment: d_t falls, only what is named moves, the stream goes on from it, and it can be rolled back."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

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
