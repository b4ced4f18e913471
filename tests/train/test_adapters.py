"""Fine-tuning of adapters: what peft makes of them, what is trained, a killed run, and mistakes."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file

from mergeway.bench.suite import load_suite
from mergeway.checkpoint import open_checkpoint
from mergeway.errors import OptionError
from mergeway.train import Training, finetune

HOW = Training(steps=6, lr=1e-2, batch=10, lora=2, freeze="^visual_projection")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(tiny.vision_suite(tmp_path_factory.mktemp("adapters") / "suite"))


@pytest.fixture(scope="module")
def made(suite, tmp_path_factory):
    out = tmp_path_factory.mktemp("adapter") / "ants"
    return out, finetune(suite, "ants", out, HOW)


def test_peft_and_a_fold_read_the_same_weights(suite, made):
    from peft import PeftModel
    from transformers import CLIPVisionModelWithProjection

    out, done = made
    base = CLIPVisionModelWithProjection.from_pretrained(suite.base).eval()
    peft = PeftModel.from_pretrained(base, out).merge_and_unload()
    folded = open_checkpoint(out, open_checkpoint(suite.base))
    theirs = dict(peft.state_dict())
    for name in folded.infos:
        assert torch.allclose(folded.read(name), done.params[name], atol=1e-6), name
        if name in theirs:
            assert torch.allclose(folded.read(name), theirs[name], atol=1e-6), name
    moved = {n for n in folded.infos if not torch.equal(folded.read(n), open_checkpoint(suite.base).read(n))}
    assert moved and all("encoder" in name and name.endswith(".weight") for name in moved)


def test_training_lowers_the_loss_and_leaves_the_suite_alone(suite, made):
    out, done = made
    assert done.log[-1]["loss"] < done.log[0]["loss"]
    assert done.moments == {} and not (out / "moments.safetensors").exists()
    settings = json.loads((out / "training.json").read_text())
    assert (settings["lora"], settings["steps"]) == (2, 6)
    assert json.loads((out / "adapter_config.json").read_text())["lora_alpha"] == 4
    assert not any("lora" in name for name, _ in suite.model.module.named_parameters())


def test_a_killed_run_goes_on_to_the_same_bits(suite, made, tmp_path, monkeypatch):
    from mergeway.train.loop import _Work

    step, done = _Work._one_step, 0

    def dies(self, *words):
        nonlocal done
        done += 1
        if done == 5:
            raise KeyboardInterrupt
        return step(self, *words)

    monkeypatch.setattr(_Work, "_one_step", dies)
    with pytest.raises(KeyboardInterrupt):
        finetune(suite, "ants", tmp_path / "ants", HOW, save_every=2)
    finetune(suite, "ants", tmp_path / "ants", HOW, save_every=2)
    ours, whole = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "ants", made[0]))
    assert ours.keys() == whole.keys() and all(torch.equal(ours[n], whole[n]) for n in whole)
    assert done == 5 + 2  # four steps were kept, so two were left


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora": 2, "tangent": True}, "neither with tangent"),
        ({"lora": 2, "ewc": 1.0}, "nor with ewc"),
        ({"lora": -1}, "lora is -1"),
        ({"lora_alpha": 4.0}, "goes with lora=RANK"),
        ({"lora": 2, "lora_alpha": 0.0}, "must be positive"),
    ],
)
def test_mistakes(given, said):
    with pytest.raises(OptionError, match=said):
        Training(**given)


def test_everything_frozen_and_another_start(suite, tmp_path):
    with pytest.raises(OptionError, match="no linear layer that is not frozen"):
        finetune(suite, "ants", tmp_path / "a", Training(steps=1, lora=2, freeze="."))
    with pytest.raises(OptionError, match="an adapter belongs to the base"):
        finetune(suite, "ants", tmp_path / "a", Training(steps=1, lora=2), start=suite.task("bees").expert)
    assert not (tmp_path / "a").exists()


def test_by_the_command(suite, tmp_path, call):
    words = ("finetune", suite.path, "ants", "--steps", 2, "--lora", 2, "--lora-alpha", 3, "--out", tmp_path / "a")
    assert "an adapter of rank 2, 2 steps" in call(*words).ok().out
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["lora_alpha"] == 3
