"""`bench TRUNK --data`: rules compared on the arrivals of a trunk; the figures are those of the model in `transformers` alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from shared import listing
from transformers import BertConfig, BertForSequenceClassification, CLIPVisionModelWithProjection

import mergeway as mw


def accuracy(suite, task: str, tensors) -> float:
    model = CLIPVisionModelWithProjection.from_pretrained(suite.base)
    model.load_state_dict({n: t for n, t in tensors.items() if n in model.state_dict()}, strict=False)
    with np.load(suite.path / "data" / f"{task}.npz") as file:
        x, y = torch.from_numpy(file["x_test"]), torch.from_numpy(file["y_test"])
    head = load_file(suite.path / "heads" / f"{task}.safetensors")["weight"]
    with torch.no_grad():
        features = model(pixel_values=(x.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5).image_embeds
    return 100 * float(((features @ head.mT).argmax(-1) == y).float().mean())


def test_every_rule_is_judged_on_the_arrivals_of_the_trunk(vision, tmp_path, call):
    names = ("ants", "bees", "cats")
    experts = [vision.task(name).expert for name in names]
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "average")
    for name, expert in zip(names, experts, strict=True):
        trunk.add(expert, name)
    before = listing(trunk.path)
    words = [word for name in names for word in ("--data", f"{name}={vision.path}#{name}")]
    found = call("bench", trunk.path, "--rules", "average,opcm:alpha=0.3", *words, "--json").json()
    assert listing(trunk.path) == before
    rows = {row["rule"]: row for row in found["rows"]}
    for label, rule, options in (("average", "average", {}), ("opcm:alpha=0.3", "opcm", {"alpha": 0.3})):
        models = [mw.merge(vision.base, experts[:k], rule, **options) for k in (1, 2, 3)]
        last = [accuracy(vision, name, models[-1]) for name in names]
        first = [accuracy(vision, name, models[k]) for k, name in enumerate(names)]
        assert rows[label]["acc"] == pytest.approx(sum(last) / 3)
        assert rows[label]["bwt"] == pytest.approx((last[0] - first[0] + last[1] - first[1]) / 2)
    ends = [load_file(expert / "model.safetensors") for expert in experts]
    alone = [accuracy(vision, name, own) for name, own in zip(names, ends, strict=True)]
    base = [accuracy(vision, name, load_file(vision.base / "model.safetensors")) for name in names]
    assert found["experts"] == pytest.approx(sum(alone) / 3) and found["base"] == pytest.approx(sum(base) / 3)
    table = call("bench", trunk.path, "--rules", "average", *words).ok().out
    assert "average" in table and "base" in table


def test_classifiers_are_judged_with_the_heads_of_the_trunk(tmp_path, call):
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    from tiny import words_tokenizer

    torch.manual_seed(0)
    vocabulary = words_tokenizer(tmp_path / "base")
    base = BertForSequenceClassification(BertConfig(vocab_size=vocabulary, num_labels=2, **size))
    base.save_pretrained(tmp_path / "base")
    trunk = mw.Trunk.create(tmp_path / "trunk", tmp_path / "base", "average")
    for task, labels in (("two", 2), ("four", 4)):
        tuned = BertForSequenceClassification.from_pretrained(
            tmp_path / "base", num_labels=labels, ignore_mismatched_sizes=True
        )
        tuned.save_pretrained(tmp_path / task)
        trunk.add(tmp_path / task)
        rows = [{"text": "a b c d"[: 1 + k % 7], "label": k % labels} for k in range(12)]
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [word for task in ("two", "four") for word in ("--data", f"{task}={tmp_path / task}.jsonl")]
    found = call("bench", trunk.path, "--rules", "average", *words, "--json").json()
    own = trunk.evaluate({task: str(tmp_path / f"{task}.jsonl") for task in ("two", "four")})
    assert found["rows"][0]["acc"] == pytest.approx((own["two"].accuracy + own["four"].accuracy) / 2)


def test_mistakes_are_one_line(vision, tmp_path, call):
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "average")
    trunk.add(vision.task("ants").expert, "ants")
    trunk.add(vision.task("bees").expert, "bees")
    data = f"ants={vision.path}#ants"
    assert "no test data of bees" in call("bench", trunk.path, "--data", data).mistake()
    both = ("--data", data, "--data", f"bees={vision.path}#bees")
    assert "holds no such task" in call("bench", trunk.path, *both, "--data", "cows=x.npz").mistake()
    assert "'steer' needs calibration" in call("bench", trunk.path, *both, "--rules", "steer").mistake()
    assert "not a trunk" in call("bench", vision.path, "--data", data).mistake()
