"""Moments from saved optimisers: a real Trainer's, a plain one, those that cannot be matched, and a pickle that would run code."""

from __future__ import annotations

import json
import os
import warnings

import pytest
import tiny
import torch
from safetensors.torch import load_file

from mergeway.bench.suite import load_suite


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_suite(tiny.vision_suite(tmp_path_factory.mktemp("optimiser") / "suite")).base


def model_of(base):
    from transformers import CLIPVisionModelWithProjection

    return CLIPVisionModelWithProjection.from_pretrained(base)


def step(model, optimiser, count=3):
    for k in range(count):
        optimiser.zero_grad()
        pixels = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(k))
        model(pixel_values=pixels).image_embeds.square().sum().backward()
        optimiser.step()
    return {n: optimiser.state[p]["exp_avg_sq"] for n, p in model.named_parameters() if p in optimiser.state}


def test_a_trainers_own_groups_are_named(base, tmp_path, call):
    from transformers import Trainer, TrainingArguments

    model = model_of(base)
    arguments = TrainingArguments(output_dir=str(tmp_path / "trainer"), report_to=[], use_cpu=True, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the library says to itself
        optimiser = Trainer(model=model, args=arguments).create_optimizer()
    assert [len(g["params"]) > 0 for g in optimiser.param_groups] == [True, True]
    expected = step(model, optimiser)
    model.save_pretrained(tmp_path / "checkpoint-3")
    torch.save(optimiser.state_dict(), tmp_path / "checkpoint-3" / "optimizer.pt")
    done = call("moments", tmp_path / "checkpoint-3", "--out", tmp_path / "v.safetensors", "--json").json()
    assert done["step"] == 3 and done["beta2"] == 0.999
    got = load_file(tmp_path / "v.safetensors")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[n], v) for n, v in expected.items())


def test_a_plain_optimiser_of_all_or_of_some_parameters(base, tmp_path, call):
    model = model_of(base)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = step(model, optimiser)
    torch.save({"optimizer": optimiser.state_dict()}, tmp_path / "all.pt")
    call("moments", tmp_path / "all.pt", "--model", base, "--out", tmp_path / "all.safetensors").ok()
    got = load_file(tmp_path / "all.safetensors")
    assert got.keys() == expected.keys() and all(torch.equal(got[n], v) for n, v in expected.items())
    some = torch.optim.Adam([p for n, p in model.named_parameters() if "encoder" in n], lr=1e-3)
    expected = step(model, some)
    torch.save(some.state_dict(), tmp_path / "some.pt")
    line = call("moments", tmp_path / "some.pt", "--model", base, "--out", tmp_path / "no.safetensors").mistake()
    assert "say which were trained with --only" in line and not (tmp_path / "no.safetensors").exists()
    words = (
        "moments",
        tmp_path / "some.pt",
        "--model",
        base,
        "--only",
        "encoder",
        "--out",
        tmp_path / "some.safetensors",
    )
    call(*words).ok()
    got = load_file(tmp_path / "some.safetensors")
    assert got.keys() == expected.keys() and all(torch.equal(got[n], v) for n, v in expected.items())
    assert "exists already" in call(*words).mistake()


def test_names_in_the_state_need_no_model(base, tmp_path, call):
    model = model_of(base)
    optimiser = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    expected = step(model, optimiser)
    torch.save(optimiser.state_dict(), tmp_path / "named.pt")
    call("moments", tmp_path / "named.pt", "--out", tmp_path / "v.safetensors").ok()
    assert load_file(tmp_path / "v.safetensors").keys() == expected.keys()


def test_what_cannot_be_matched_is_said(base, tmp_path, call):
    model = model_of(base)
    shuffled = torch.optim.AdamW(list(model.parameters())[::-1], lr=1e-3)
    step(model, shuffled)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step_sgd(model, sgd)
    cases = {
        "shuffled": (shuffled.state_dict(), "cannot be matched with the model"),
        "sgd": (sgd.state_dict(), "no exp_avg_sq"),
        "fresh": (torch.optim.AdamW(model.parameters()).state_dict(), "has not made a step yet"),
        "other": ({"weights": torch.ones(2)}, "not the state of a torch optimiser"),
    }
    for name, (state, said) in cases.items():
        torch.save(state, tmp_path / f"{name}.pt")
        line = call("moments", tmp_path / f"{name}.pt", "--model", base, "--out", tmp_path / "v.safetensors").mistake()
        assert said in line and not (tmp_path / "v.safetensors").exists()
    torch.save(shuffled.state_dict(), tmp_path / "alone.pt")
    line = call("moments", tmp_path / "alone.pt", "--out", tmp_path / "v.safetensors").mistake()
    assert "give the model's directory with --model" in line


@pytest.mark.parametrize("broken", [{"architectures": ["NoSuchModel"]}, {"hidden_size": "wide"}, {"architectures": []}])
def test_a_config_that_makes_no_model_is_said(base, tmp_path, call, broken):
    model = model_of(base)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimiser, 1)
    torch.save(optimiser.state_dict(), tmp_path / "optimizer.pt")
    described = json.loads((base / "config.json").read_text()) | broken
    (tmp_path / "config.json").write_text(json.dumps(described))
    line = call("moments", tmp_path, "--out", tmp_path / "v.safetensors").mistake()
    assert "transformers makes no model of architecture" in line and not (tmp_path / "v.safetensors").exists()


def step_sgd(model, optimiser):
    model(pixel_values=torch.randn(1, 3, 8, 8)).image_embeds.sum().backward()
    optimiser.step()


class Malicious:
    """Unpickling this makes a file: what a careless reader would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_malicious_pickle_does_not_run(base, tmp_path, call):
    state = {"state": {0: {"exp_avg_sq": Malicious(tmp_path / "ran")}}, "param_groups": [{"params": [0]}]}
    torch.save(state, tmp_path / "optimizer.pt")
    line = call("moments", tmp_path / "optimizer.pt", "--model", base, "--out", tmp_path / "v.safetensors").mistake()
    assert "refused by torch's weights-only reader" in line
    assert not (tmp_path / "ran").exists() and not (tmp_path / "v.safetensors").exists()
    torch.load(tmp_path / "optimizer.pt", weights_only=False)  # the trap does work on those who step into it
    assert (tmp_path / "ran").exists()
