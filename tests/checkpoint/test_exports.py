"""Every export of every kind of model is loaded again by `transformers` or `peft`, with the heads, labels and cards that belong to it."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers as hf
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
