"""Small GPT-style and BERT-style streams, made here: folded with memory, judged, exported whole and as LoRA, loaded again."""

from __future__ import annotations

import json
import logging
import random

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

import mergeway as mw
from mergeway.calibration.task_data import task_data
from mergeway.checkpoint import open_checkpoint
from mergeway.model.kinds import kind_of, make_model

logging.getLogger("transformers").setLevel(logging.ERROR)

TOPICS = {"sea": ["waves", "salt", "ship", "gull"], "wood": ["oak", "moss", "deer", "fern"], "town": ["tram", "clock"]}
COMMON = ["the", "a", "sees", "near", "and"]
RULES = ["opcm", "ode", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("average", "iso"))]


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<end>", "<unk>", *COMMON, *(w for topic in TOPICS.values() for w in topic)]
    made = Tokenizer(WordLevel({w: k for k, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    return fast


def sentence(rng: random.Random, topic: str) -> str:
    words = TOPICS[topic]
    return f"the {rng.choice(words)} sees a {rng.choice(words)} near the {rng.choice(words)}"


def save(model, folder) -> None:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tune(model, loss, steps: int = 12) -> None:
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        adam.zero_grad()
        loss(model).backward()
        adam.step()


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    """A random GPT-2, three arrivals tuned on generated text, and that text as JSON lines."""
    folder, rng = tmp_path_factory.mktemp("gpt"), random.Random(0)
    torch.manual_seed(0)
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=18, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    )
    save(base, folder / "base")
    for topic in TOPICS:
        texts = [sentence(rng, topic) for _ in range(24)]
        (folder / f"{topic}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        ids = tokenizer()(texts, return_tensors="pt")["input_ids"]
        tune(model, lambda m, ids=ids: m(input_ids=ids, labels=ids).loss)
        save(model, folder / topic)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A random BERT classifier, three arrivals with heads of two, three and two classes, and their data."""
    folder, rng = tmp_path_factory.mktemp("bert"), random.Random(1)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=18, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    save(BertForSequenceClassification(config), folder / "base")
    names = list(TOPICS)
    for number, task in enumerate(names):
        classes = (2, 3, 2)[number]
        rows = [(sentence(rng, names[(number + k) % 3]), k) for _ in range(12) for k in range(classes)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps({"text": t, "label": y}) + "\n" for t, y in rows))
        model = AutoModelForSequenceClassification.from_pretrained(
            folder / "base", num_labels=classes, ignore_mismatched_sizes=True
        )
        inputs = tokenizer()([t for t, _ in rows], return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        labels = torch.tensor([y for _, y in rows])
        tune(model, lambda m, i=inputs, y=labels: m(**i, labels=y).loss)
        save(model, folder / task)
    return folder


def fold(folder, where, rule) -> mw.Trunk:
    trunk = mw.Trunk.create(where, folder / "base", rule)
    for task in TOPICS:
        trunk.add(folder / task, task, data=str(folder / f"{task}.jsonl") if rule == "ode" else None)
    return trunk


def losses(folder, params, heads=None) -> dict[str, float]:
    """What the product's own objective says of a model."""
    settings = kind_of(folder / "base")
    samples = [
        task_data(str(folder / f"{t}.jsonl"), None, t, folder / "base", heads[t] if heads else None)[1] for t in TOPICS
    ]
    return mw.Objective(make_model(folder / "base", settings), samples).task_losses(params)


@pytest.mark.parametrize("rule", RULES)
def test_gpt_stream(gpt, tmp_path, rule):
    trunk = fold(gpt, tmp_path / "trunk", rule)
    params = trunk.params()
    base = open_checkpoint(gpt / "base")
    before = losses(gpt, {n: base.read(n) for n in base.infos})
    after = losses(gpt, params)
    assert sum(after.values()) < sum(before.values())
    if rule == "ode":
        assert trunk.memory()["kind"] == "causal-lm"
        assert [row["task"] for row in trunk.memory()["tasks"]] == list(TOPICS)
    trunk.export(tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    # The loss that transformers computes itself on the same texts is the objective's.
    for task in TOPICS:
        samples = task_data(str(gpt / f"{task}.jsonl"), None, task, gpt / "base")[1]
        theirs = whole(**samples.inputs, labels=samples.labels).loss
        assert theirs.item() == pytest.approx(after[task], rel=1e-5)
    done = trunk.export_lora(tmp_path / "adapter", 16)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(gpt / "base"), tmp_path / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    for row in done.layers:
        torch.testing.assert_close(merged[row.name], params[row.name], rtol=0, atol=1e-6)
    assert {row.name for row in done.layers} == {n for n in params if n.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_bert_stream(bert, tmp_path, rule):
    trunk = fold(bert, tmp_path / "trunk", rule)
    trunk.export(tmp_path / "whole", backbone=True)
    shared = {n: t for n, t in trunk.params().items() if not n.startswith("classifier")}
    heads = {t: load_file(tmp_path / "whole" / "heads" / f"{t}.safetensors") for t in TOPICS}
    assert [len(heads[t]["classifier.weight"]) for t in TOPICS] == [2, 3, 2]
    after = losses(bert, shared, heads)
    for task in TOPICS:
        original = load_file(bert / task / "model.safetensors")
        assert all(torch.equal(heads[task][n], original[n]) for n in ("classifier.weight", "classifier.bias"))
        trunk.export(tmp_path / task, task=task)
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / task)
        samples = task_data(str(bert / f"{task}.jsonl"), None, task, bert / "base", heads[task])[1]
        logits = model(**samples.inputs).logits
        assert logits.shape[1] == len(heads[task]["classifier.weight"])
        theirs = torch.nn.functional.cross_entropy(logits, samples.labels)
        assert theirs.item() == pytest.approx(after[task], rel=1e-5)
    trunk.export_lora(tmp_path / "adapter", 16, backbone=True)
    model = AutoModelForSequenceClassification.from_pretrained(bert / "base")
    merged = PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload().state_dict()
    for name in shared:
        if name.endswith(("dense.weight", "query.weight", "key.weight", "value.weight")):
            torch.testing.assert_close(merged[name], shared[name], rtol=0, atol=1e-6)
    assert trunk.verify() == []


def test_heads_follow_the_journal(bert, tmp_path):
    """Heads go with their tasks: back with a rollback, out with a removal; the base's own stays in the deployed model."""
    trunk = fold(bert, tmp_path / "trunk", "average")
    base = load_file(bert / "base" / "model.safetensors")
    assert torch.equal(trunk.params()["classifier.weight"], base["classifier.weight"])
    trunk.remove("wood", bert / "wood")
    trunk.export(tmp_path / "out", backbone=True)
    assert {p.stem for p in (tmp_path / "out" / "heads").iterdir()} == {"sea", "town"}
    trunk.rollback(3)
    trunk.export(tmp_path / "again", backbone=True)
    assert {p.stem for p in (tmp_path / "again" / "heads").iterdir()} == set(TOPICS)
    with pytest.raises(mw.MergewayError, match="task 'lake' has no head of its own"):
        trunk.export(tmp_path / "no", task="lake")
    merged = mw.Trunk.create(tmp_path / "merged", bert / "base", "average", heads="")
    with pytest.raises(mw.MergewayError, match=r"classifier.weight' \[3, 16\] for \[2, 16\]"):
        merged.add(bert / "wood")


def test_chats_and_prompts_are_masked(gpt, tmp_path):
    model = make_model(gpt / "base", kind_of(gpt / "base"))
    rows = [
        {"prompt": "the oak", "completion": " sees a deer"},
        {"messages": [{"role": "user", "content": "the oak"}, {"role": "assistant", "content": "sees moss"}]},
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    samples = task_data(str(tmp_path / "d.jsonl"), None, "t", gpt / "base")[1]
    judged = [model.tokenizer.convert_ids_to_tokens([i for i in row.tolist() if i >= 0]) for row in samples.labels]
    assert judged == [["sees", "a", "deer"], ["sees", "moss"]]
    assert samples.labels.shape == (2, 6)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": ""}, "line 1: expected an object with a non-empty 'text'"),
        ({"messages": [{"role": "user"}]}, "needs 'role' and 'content'"),
        ("no json", "line 1: expected an object"),
    ],
)
def test_mistakes_in_text(gpt, tmp_path, row, said):
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(mw.MergewayError, match=said):
        task_data(str(tmp_path / "d.jsonl"), None, "t", gpt / "base")
