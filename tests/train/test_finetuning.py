"""Fine-tuning: what an arrival holds, moments as the optimiser has them, a killed run, regularisers, and mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional

import mergeway
from mergeway.bench.suite import load_suite
from mergeway.checkpoint import open_checkpoint
from mergeway.errors import OptionError
from mergeway.train import Training, finetune


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(tiny.vision_suite(tmp_path_factory.mktemp("finetune") / "suite"))


def by_hand(suite, steps, training, task="ants"):
    """The same training with a module of transformers, torch's AdamW and nothing of ours but batches and rates."""
    from transformers import CLIPVisionModelWithProjection

    model = CLIPVisionModelWithProjection.from_pretrained(suite.base).eval()
    optimiser = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    samples = suite.samples(task, "train")
    for step, rows in enumerate(training.batches(len(samples), 0, steps)):
        for group in optimiser.param_groups:
            group["lr"] = training.rate(step, steps)
        pixels = (samples.inputs["images"][rows].permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        features = functional.normalize(model(pixel_values=pixels).image_embeds, dim=-1)
        optimiser.zero_grad()
        functional.cross_entropy(tiny.SCALE * features @ samples.head.mT, samples.labels[rows]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimiser.step()
    state = {n: optimiser.state[p] for n, p in model.named_parameters() if p in optimiser.state}
    return dict(model.named_parameters()), state


def test_moments_are_those_of_the_optimiser(suite, tmp_path, monkeypatch):
    training, made = Training(steps=7, lr=1e-2, batch=10), []

    class Recorded(torch.optim.AdamW):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            made.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", Recorded)
    finetune(suite, "ants", tmp_path / "ants", training, command="mergeway finetune …")
    (ours,) = made
    params, state = by_hand(suite, 7, training)
    moments, model = (
        load_file(tmp_path / "ants" / "moments.safetensors"),
        load_file(tmp_path / "ants/model.safetensors"),
    )
    assert moments.keys() == state.keys()
    for name, parameter in zip(open_checkpoint(suite.base).infos, ours.param_groups[0]["params"], strict=True):
        assert torch.equal(moments[name], ours.state[parameter]["exp_avg_sq"]), name
        assert torch.equal(model[name], parameter.detach()), name
    for name, held in state.items():
        # A key's bias moves all scores of a query alike, so its gradient is rounding, which Adam blows up to steps.
        if not name.endswith("k_proj.bias"):
            assert torch.allclose(moments[name], held["exp_avg_sq"], rtol=1e-3, atol=1e-9), name
            assert torch.allclose(model[name], params[name].detach(), atol=1e-4), name
    with safe_open(tmp_path / "ants" / "moments.safetensors", "pt") as file:
        assert file.metadata()["step"] == "7" and file.metadata()["beta2"] == "0.999"
    log = [json.loads(line) for line in (tmp_path / "ants" / "training.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == list(range(1, 8))
    assert json.loads((tmp_path / "ants" / "training.json").read_text())["command"] == "mergeway finetune …"
    trunk = mergeway.Trunk.create(tmp_path / "trunk", suite.base, "fisher")
    trunk.add(tmp_path / "ants")
    assert all(torch.allclose(trunk.params()[n], model[n], atol=1e-6) for n in model)


def test_training_lowers_the_loss_from_every_start(suite, tmp_path):
    how = Training(steps=25, lr=5e-3, batch=24)
    first = finetune(suite, "ants", tmp_path / "ants", how)
    assert first.log[-1]["loss"] < 0.85 * first.log[0]["loss"]
    tangent = finetune(suite, "ants", None, Training(steps=25, lr=5e-3, batch=24, tangent=True))
    assert tangent.log[-1]["loss"] < 0.85 * tangent.log[0]["loss"]
    again = finetune(suite, "ants", None, how, start=tmp_path / "ants")
    assert again.log[0]["loss"] == pytest.approx(first.log[-1]["loss"], abs=0.1)
    trunk = mergeway.Trunk.create(tmp_path / "trunk", suite.base, "average")
    trunk.add(tmp_path / "ants")
    third = finetune(suite, "ants", None, how, start=trunk.path)
    assert third.log[0]["loss"] == pytest.approx(again.log[0]["loss"], abs=1e-4)
    joint = finetune(suite, ["ants", "bees"], None, Training(steps=30, lr=5e-3))
    assert joint.log[-1]["loss"] < 0.97 * joint.log[0]["loss"]
    frozen = finetune(suite, "ants", None, Training(steps=2, lr=5e-3, freeze="visual_projection"))
    assert not any("visual_projection" in n for n in frozen.moments)


def test_lwf_and_ewc_stay_nearer_to_the_start(suite, tmp_path):
    sample = {"ewc_fisher": "per-sample"}
    free = Training(steps=15, lr=5e-3)
    finetune(suite, "ants", tmp_path / "first", Training(steps=15, lr=5e-3, ewc=1e-3, **sample))
    start = load_file(tmp_path / "first" / "model.safetensors")

    def moved(how):
        done = finetune(suite, "bees", None, how, start=tmp_path / "first")
        return sum(float((done.params[n] - start[n]).square().sum()) for n in done.params) ** 0.5

    plain = moved(free)
    assert moved(Training(steps=15, lr=5e-3, lwf=30.0)) < plain
    assert moved(Training(steps=15, lr=5e-3, ewc=1e6, **sample)) < 0.9 * plain
    fisher = load_file(tmp_path / "first" / "fisher.safetensors")
    for name, square in tiny.per_sample_fisher(suite, "ants", tmp_path / "first").items():
        assert torch.allclose(fisher[name], square, rtol=1e-3, atol=1e-8), name
    finetune(
        suite, "bees", tmp_path / "second", Training(steps=2, lr=5e-3, ewc=1.0, **sample), start=tmp_path / "first"
    )
    later = load_file(tmp_path / "second" / "fisher.safetensors")
    own = tiny.per_sample_fisher(suite, "bees", tmp_path / "second")
    for name, square in own.items():
        assert torch.allclose(later[name], 0.5 * fisher[name] + 0.5 * square, rtol=1e-3, atol=1e-8), name


def test_a_killed_run_goes_on_to_the_same_bits(suite, tmp_path):
    words = [sys.executable, "-m", "mergeway", "finetune", suite.path, "ants", "--steps", 120, "--lr", "1e-3"]
    words = [str(w) for w in [*words, "--batch", 6, "--save-every", 1, "--quiet", "--out"]]
    finetune(suite, "ants", tmp_path / "whole", Training(steps=120, lr=1e-3, batch=6))
    state = tmp_path / ".killed.training" / "state.pt"
    process = subprocess.Popen([*words, str(tmp_path / "killed")])
    while not state.exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert state.exists() and not (tmp_path / "killed").exists()
    assert 0 < torch.load(state, weights_only=True)["step"] < 120
    with pytest.raises(OptionError, match="other settings"):
        finetune(suite, "ants", tmp_path / "killed", Training(steps=121, lr=1e-3, batch=6))
    finetune(suite, "ants", tmp_path / "killed", Training(steps=120, lr=1e-3, batch=6))
    for name in ("model.safetensors", "training.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # The safetensors library writes the entries of its metadata in any order.
    (tensors, about), (expected, wanted) = (
        (load_file(path), safe_open(path, "pt").metadata())
        for path in (tmp_path / run / "moments.safetensors" for run in ("killed", "whole"))
    )
    assert about == wanted and tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[n], expected[n]) for n in expected)
    assert sorted(os.listdir(tmp_path)) == ["killed", "whole"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nope",), "has no task 'nope'"),
        (("ants", "--lr", "-1"), "--lr is -1.0"),
        (("ants", "--warmup", "2"), "--warmup is 2.0"),
        (("ants", "--lwf", "--ewc"), "give one of them"),
        (("ants", "--freeze", "."), "leaves no parameter"),
        (("ants", "--freeze", "["), "not a regular expression"),
        (("ants", "--start", "nowhere"), "nowhere"),
        (("ants", "--save-every", "0"), "--save-every is 0"),
        (("ants", "--classes", "mine"), "--classes is 'mine'"),
        (("ants", "--lwf", "--lwf-classes", "odl"), "did you mean 'old'"),
        (("ants", "--ewc", "--ewc-fisher", "exact"), "--ewc-fisher is 'exact'"),
        (("bees", "--lwf", "--learned", "nope"), "has no task 'nope'"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(words, said, suite, tmp_path, call):
    assert said in call("finetune", suite.path, *words, "--out", tmp_path / "out").mistake()
    assert not (tmp_path / "out").exists()


def test_a_suite_recommends_how_its_models_are_trained(suite, tmp_path, call):
    """What is given comes first; steps and epochs stand for each other."""
    import shutil

    copy = tmp_path / "suite"
    shutil.copytree(suite.path, copy)
    described = json.loads((copy / "suite.json").read_text())
    file = copy / "suite.json"
    file.write_text(
        json.dumps(described | {"training": {"steps": 3, "lr": 0.002, "batch": 8, "freeze": "^visual_pro"}})
    )
    for words, expected in (
        ((), {"steps": 3, "lr": 0.002, "batch": 8, "freeze": "^visual_pro", "weight_decay": 0.1}),
        (("--lr", "0.5", "--seed", "4"), {"steps": 3, "lr": 0.5, "seed": 4, "batch": 8}),
        (("--epochs", "1", "--batch", "24"), {"steps": None, "epochs": 1, "batch": 24, "lr": 0.002}),
    ):
        out = tmp_path / "-".join(("out", *words))
        call("finetune", copy, "ants", "--out", out, *words).ok()
        found = json.loads((out / "training.json").read_text())
        assert {name: found[name] for name in expected} == expected
    file.write_text(json.dumps(described | {"training": {"rate": 0.002}}))
    assert "'training' has no entry 'rate'" in call("finetune", copy, "ants", "--out", tmp_path / "x").mistake()


def test_labels_out_of_range(suite, tmp_path, call):
    import shutil

    import numpy as np

    copy = tmp_path / "suite"
    shutil.copytree(suite.path, copy)
    arrays = dict(np.load(copy / "data" / "ants.npz"))
    arrays["y_train"][0] = 7
    np.savez(copy / "data" / "ants.npz", **arrays)
    line = call("finetune", copy, "ants", "--out", tmp_path / "out").mistake()
    assert "label 7 is out of range" in line and not (tmp_path / "out").exists()
