"""Every export of every kind of model is loaded again by `transformers` or `peft`, with the heads, labels and cards that belong to it."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers as hf
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file

import mergeway as mw

logging.getLogger("transformers").setLevel(logging.ERROR)

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
GPT = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}

# The class of each kind, and its config with so many labels (None where the config is to say nothing of them).
KINDS = {
    "bert": (hf.BertForSequenceClassification, lambda **o: hf.BertConfig(vocab_size=32, **SMALL, **o)),
    "distilbert": (
        hf.DistilBertForSequenceClassification,
        lambda **o: hf.DistilBertConfig(vocab_size=32, dim=16, hidden_dim=24, n_layers=1, n_heads=2, **o),
    ),
    "roberta": (hf.RobertaForSequenceClassification, lambda **o: hf.RobertaConfig(vocab_size=32, **SMALL, **o)),
    "vit": (hf.ViTForImageClassification, lambda **o: hf.ViTConfig(image_size=8, patch_size=4, **SMALL, **o)),
    "gpt2": (hf.GPT2ForSequenceClassification, lambda **o: hf.GPT2Config(**GPT, pad_token_id=0, **o)),
    "llama": (
        hf.LlamaForSequenceClassification,
        lambda **o: hf.LlamaConfig(vocab_size=32, pad_token_id=0, num_key_value_heads=1, **SMALL, **o),
    ),
}
NAMED = {"id2label": {0: "no", 1: "yes", 2: "maybe"}, "label2id": {"no": 0, "yes": 1, "maybe": 2}}


@pytest.fixture(params=KINDS)
def classifiers(request, tmp_path):
    """A base with ten labels and a trunk of three arrivals: two labels without names, three with, and twenty, more than features."""
    family, config = KINDS[request.param]
    torch.manual_seed(0)
    base = family(config(num_labels=10, problem_type="multi_label_classification"))
    base.save_pretrained(tmp_path / "base")
    trunk = mw.Trunk.create(tmp_path / "trunk", tmp_path / "base", "average")
    for task, labels in (("binary", {}), ("named", NAMED), ("many", {"num_labels": 20})):
        tuned = family(config(**labels))
        own = tuned.state_dict()
        shared = {n: t + 0.01 * torch.randn_like(t) for n, t in base.state_dict().items() if t.shape == own[n].shape}
        tuned.load_state_dict({**own, **shared})
        tuned.save_pretrained(tmp_path / task)
        trunk.add(tmp_path / task)
    assert "id2label" not in json.loads((tmp_path / "binary" / "config.json").read_text())
    return family, trunk


def own_head(folder) -> dict[str, torch.Tensor]:
    words = ("classifier", "score", "pre_classifier")
    return {n: t for n, t in load_file(folder / "model.safetensors").items() if n.startswith(words)}


def test_a_classifier_with_a_tasks_head_is_loaded_with_its_labels(classifiers, tmp_path):
    family, trunk = classifiers
    for task, count in (("binary", 2), ("named", 3), ("many", 20)):
        trunk.export(tmp_path / f"out-{task}", task=task)
        model = family.from_pretrained(tmp_path / f"out-{task}")
        assert model.config.num_labels == count
        assert model.config.problem_type is None
        head = own_head(tmp_path / task)
        assert head
        assert all(torch.equal(model.state_dict()[n], t) for n, t in head.items())
    assert model.config.id2label == {k: f"LABEL_{k}" for k in range(20)}
    assert family.from_pretrained(tmp_path / "out-named").config.label2id == NAMED["label2id"]


WHOLE = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32, num_key_value_heads=1, **SMALL)),
    "encoder": lambda: hf.BertModel(hf.BertConfig(vocab_size=32, **SMALL)),
    "clip": lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(image_size=8, patch_size=4, **SMALL)),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_without_heads_of_tasks_is_loaded_as_it_is(kind, tmp_path):
    torch.manual_seed(0)
    base = WHOLE[kind]()
    base.save_pretrained(tmp_path / "base")
    trunk = mw.Trunk.create(tmp_path / "trunk", tmp_path / "base", "average")
    trunk.add({n: t + 0.01 for n, t in load_file(tmp_path / "base" / "model.safetensors").items()}, "a")
    trunk.export(tmp_path / "out")
    type(base).from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    read = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(read[n], t) for n, t in trunk.params().items())


def front_matter(folder) -> dict[str, object]:
    text = (folder / "README.md").read_text().split("---")[1]
    return dict(line.split(": ", 1) for line in text.strip().splitlines())


def repository(name: str):
    """The snapshot of a repository in the hub's cache."""
    root = Path(os.environ["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text("0" * 40)
    return root / "snapshots" / ("0" * 40)


def test_a_card_shows_nobodys_directories(stream, tmp_path):
    """What is pushed is read by others; names and digests say what went in."""
    s, folder = stream(2), tmp_path / "runs" / "birds"
    folder.mkdir(parents=True)
    (folder / "checkpoint-96").mkdir()
    shutil.copy(s.arrivals[0], folder / "checkpoint-96" / "model.safetensors")
    trunk = mw.Trunk.create(tmp_path / "trunk", s.base, "average")
    trunk.add(folder / "checkpoint-96")
    trunk.add(s.arrivals[1])
    trunk.export(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert str(tmp_path) not in card
    assert f"Base: `{s.base.name}`" in card and "`birds/checkpoint-96`" in card and f"`{s.arrivals[1].name}`" in card


@pytest.mark.parametrize("revision", ["", "@main"])
def test_cards_and_adapters_name_a_base_of_the_hub_as_the_hub_does(revision, tmp_path):
    folder = repository("me/tiny")
    torch.manual_seed(0)
    WHOLE["llama"]().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    moved = {n: t + 0.1 * torch.randn(t.shape) for n, t in tensors.items()}
    trunk = mw.Trunk.create(tmp_path / "trunk", f"me/tiny{revision}", "average")
    trunk.add(moved, "a")
    trunk.export(tmp_path / "out")
    trunk.export_lora(tmp_path / "adapter", 4)
    mw.merge_into(tmp_path / "merged", f"me/tiny{revision}", [moved])
    for out, relation in (("out", "merge"), ("merged", "merge"), ("adapter", "adapter")):
        card = front_matter(tmp_path / out)
        assert card["base_model"] == '"me/tiny"'
        assert card["base_model_relation"] == relation
    config = PeftConfig.from_pretrained(tmp_path / "adapter")
    assert (config.base_model_name_or_path, config.revision) == ("me/tiny", revision[1:] or None)


def test_cards_leave_a_base_on_this_disk_out_and_take_its_licence(tmp_path, monkeypatch):
    torch.manual_seed(0)
    WHOLE["llama"]().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\n# Base\nlicense: none\n")
    moved = {n: t + 0.1 for n, t in load_file(tmp_path / "base" / "model.safetensors").items()}
    monkeypatch.chdir(tmp_path)
    trunk = mw.Trunk.create("trunk", "base", "average")
    trunk.add(moved, "a")
    trunk.export("out")
    mw.merge_into("merged", "base", [moved])
    for out in ("out", "merged"):
        card = front_matter(tmp_path / out)
        assert "base_model" not in card and "base_model_relation" not in card
        assert card["license"] == '"apache-2.0"'


def test_the_adapter_of_a_task_keeps_its_head(classifiers, tmp_path, call):
    family, trunk = classifiers
    for task, count in (("binary", 2), ("many", 20)):
        done = call("export", trunk.path, tmp_path / f"lora-{task}", "--lora", 16, "--task", task).ok()
        base = family.from_pretrained(tmp_path / "base", num_labels=count, ignore_mismatched_sizes=True)
        model = PeftModel.from_pretrained(base, tmp_path / f"lora-{task}").merge_and_unload()
        model.save_pretrained(tmp_path / f"loaded-{task}")
        read, deployed = load_file(tmp_path / f"loaded-{task}" / "model.safetensors"), trunk.params()
        head = own_head(tmp_path / task)
        assert all(torch.equal(read[n], t) for n, t in head.items())
        linear = [n for n, t in deployed.items() if t.ndim == 2 and n not in head and ".layer" in n]
        for name in linear:
            torch.testing.assert_close(read[name], deployed[name], rtol=0, atol=1e-5)
        assert f"num_labels={count}" in (tmp_path / f"lora-{task}" / "README.md").read_text()
    assert "as a rank-16 adapter" in done.out


def test_a_small_rank_says_what_it_loses(tmp_path, call):
    torch.manual_seed(0)
    WHOLE["llama"]().save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    trunk = mw.Trunk.create(tmp_path / "trunk", tmp_path / "base", "average")
    trunk.add({n: t + 0.1 * torch.randn(t.shape) if "_proj" in n else t for n, t in tensors.items()}, "a")
    done = call("export", trunk.path, tmp_path / "small", "--lora", 1).ok()
    assert "keeps only" in done.err and "--lora" in done.err
    kept = call("export", trunk.path, tmp_path / "again", "--lora", 1, "--json").json()["kept"]
    assert f"{100 * kept:.2f} %" in (tmp_path / "small" / "README.md").read_text()
    assert call("export", trunk.path, tmp_path / "whole", "--lora", 16).ok().err == ""
    assert "100.00 %" in (tmp_path / "whole" / "README.md").read_text()


def test_the_heads_of_tasks_are_not_left_behind_without_a_word(classifiers, tmp_path, call):
    family, trunk = classifiers
    for words in ([], ["--lora", 4]):
        line = call("export", trunk.path, tmp_path / "out", *words).mistake()
        assert "--task" in line and "--backbone" in line and "binary, named, many" in line
        assert not (tmp_path / "out").exists()
    assert "give one of them" in call(
        "export", trunk.path, tmp_path / "out", "--task", "binary", "--backbone"
    ).mistake()  # fmt: skip
    call("export", trunk.path, tmp_path / "out", "--backbone").ok()
    assert family.from_pretrained(tmp_path / "out").config.num_labels == 10
    head = load_file(tmp_path / "out" / "heads" / "many.safetensors")
    assert all(torch.equal(head[n], t) for n, t in own_head(tmp_path / "many").items())
    call("export", trunk.path, tmp_path / "adapter", "--backbone", "--lora", 4).ok()
    assert (tmp_path / "adapter" / "heads" / "many.safetensors").exists()
