"""The certificate over a stream: what the journal says of every task, by hand, and the bound that certify=stream keeps."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import tiny
import torch
from transformers import CLIPVisionModelWithProjection

import mergeway as mw
from mergeway.bench.report.trunk_data import trunk_data
from mergeway.calibration.memory import Bounds

SIZE = 24


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return mw.load_suite(tiny.vision_suite(tmp_path_factory.mktemp("stream"), ("ants", "bees", "cats", "dogs")))


@cache
def tower(path):
    return CLIPVisionModelWithProjection.from_pretrained(path).eval()


def by_hand(suite, params, task, count):
    """The cross-entropy of the first samples of a task's draw, with a tower of transformers."""
    from mergeway.calibration.samples import draw

    model = tower(suite.base)
    model.load_state_dict(params, strict=False)
    samples = draw(suite.samples(task, "train"), count)
    with torch.no_grad():
        features = model(pixel_values=samples.inputs["images"].permute(0, 3, 1, 2).float() / 127.5 - 1).image_embeds
    scores = (tiny.SCALE * features / features.norm(dim=-1, keepdim=True) @ samples.head.mT).double().numpy()
    chosen = scores[np.arange(len(scores)), samples.labels.numpy()]
    return float(np.mean(np.log(np.exp(scores).sum(1)) - chosen))


def grown(suite, path, **options):
    """A trunk of four tasks; the deployed model after each of them."""
    trunk = mw.Trunk.create(path, suite.base, mw.rules.Ode(**options), keep=9, memory=Bounds(SIZE))
    for task in suite.tasks:
        trunk.add(task.expert, task=task.name, data=f"{suite.path}#{task.name}")
    return trunk


def params_of(trunk, step):
    found = trunk.deployed(step)
    return {n: found.read(n).clone() for n in found.infos}


def test_the_journal_has_the_losses_of_every_task(suite, tmp_path):
    trunk = grown(suite, tmp_path / "trunk", certify=True, step=0.1)
    names = [t.name for t in suite.tasks]
    risen, highest, within = {}, {}, 0
    for k, record in enumerate(trunk.log()[-4:], 1):
        losses = {t: by_hand(suite, params_of(trunk, k), t, SIZE // k) for t in names[:k]}
        assert record.details["facts"][f"risen {names[k - 1]}"] == 0.0
        risen[names[k - 1]] = 0.0
        if k == 1:
            continue
        told, t = record.details["stream"], record.details["trajectory"]["until"]
        before = {n: by_hand(suite, params_of(trunk, k - 1), n, SIZE // k) for n in names[:k]}
        goal = {n: by_hand(suite, params_of_expert(suite, names[k - 1]), n, SIZE // k) for n in names[:k]}
        assert told["before"] == pytest.approx(before, abs=1e-4)
        assert told["after"] == pytest.approx(losses, abs=1e-4)
        barriers = {n: losses[n] - (1 - t) * before[n] - t * goal[n] for n in losses}
        assert told["barriers"] == pytest.approx(barriers, abs=1e-4)
        highest |= {n: max(barrier, highest.get(n, -np.inf)) for n, barrier in barriers.items()}
        path = record.details["trajectory"]
        within += path["barrier"] <= max(path["losses"][0] - np.mean(list(goal.values())), 0.0) + 1e-4
        # Each fold has other samples of a task, so what it rose is a sum over the folds, before and after on the same ones.
        rises = {n: risen[n] + losses[n] - before[n] for n in names[: k - 1]}
        risen |= rises
        assert told["rises"] == pytest.approx(rises, abs=1e-4)
        assert told["worst"] == max(rises, key=rises.get)
        assert told["certified"] == (max(rises.values()) <= 0.05)
    shown = trunk_data(trunk)["stream"]
    assert shown["folds"] == 3 and shown["worst"] == told["worst"] and shown["within"] == within
    for what, expected in (("rise", risen), ("barrier", highest)):
        rows = {row["task"]: row[what] for row in shown["tasks"]}
        assert rows == pytest.approx({n: expected[n] for n in names[:3]}, abs=1e-4)


def params_of_expert(suite, task):
    return tower(suite.task(task).expert).state_dict()


@pytest.mark.parametrize("budget", [0.0, 0.1])
def test_the_bound_of_the_stream_is_kept(suite, tmp_path, budget):
    free = grown(suite, tmp_path / "free", certify=True, step=0.1)
    held = grown(suite, tmp_path / "held", certify="stream", budget=budget, step=0.1)
    broken = [r.details["stream"]["rises"] for r in free.log() if "stream" in r.details]
    assert any(rise > budget for rises in broken for rise in rises.values()), "the bound must have something to do"
    shorter = 0
    for k, record in enumerate(held.log()[-4:], 1):
        if k > 1:
            assert max(record.details["stream"]["rises"].values()) <= budget
            assert record.details["stream"]["certified"]
        shorter += k > 1 and record.details["facts"]["time"] < 1 / k - 1e-9
    assert shorter > 0


def test_a_fold_that_is_refused_changes_no_rise(suite, tmp_path):
    """Nothing moves, so nothing has risen, though the loss on fewer samples is another; and the bound holds after it."""
    refused = grown(suite, tmp_path / "refused", certify="stream", budget=0.0, step=0.1, time=0.0)
    for record in [r for r in refused.log() if "stream" in r.details]:
        told = record.details["stream"]
        assert told["after"] == told["before"] and set(told["rises"].values()) == {0.0} and told["certified"]
    counts = [r.details["stream"]["before"]["ants"] for r in refused.log() if "stream" in r.details]
    assert len(set(counts)) > 1, "the samples must have been others"


def test_off_measures_nothing(suite, tmp_path):
    trunk = grown(suite, tmp_path / "trunk", step=0.2)
    assert not any("stream" in r.details or "risen ants" in r.details.get("facts", {}) for r in trunk.log())
    assert trunk_data(trunk)["stream"] is None


def test_the_option_is_read_from_text():
    from mergeway.errors import OptionError
    from mergeway.rules import make

    assert make("ode", {"certify": "stream"}).certify == "stream" and make("ode", {"certify": "true"}).certify is True
    with pytest.raises(OptionError, match="true or false or stream"):
        make("ode", {"certify": "always"})
    with pytest.raises(OptionError, match="at least 0"):
        make("ode", {"budget": -1})
