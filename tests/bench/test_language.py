"""A suite of kind causal-lm: trained whole and as an adapter, judged by tokens, loss and choices, folded and compared."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tiny
import torch

from mergeway.bench import bench
from mergeway.bench.suite import load_suite
from mergeway.bench.suites import check_suite
from mergeway.checkpoint import open_checkpoint
from mergeway.errors import OptionError
from mergeway.train import Training, finetune


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny suite with one expert trained whole and one as an adapter."""
    where = tiny.language_suite(tmp_path_factory.mktemp("language") / "suite")
    suite = load_suite(where)
    finetune(suite, "pattern", where / "experts" / "pattern", Training(steps=25, lr=2e-2, batch=8))
    finetune(suite, "verbs", where / "experts" / "verbs", Training(steps=25, lr=5e-2, batch=8, lora=4))
    return tiny.with_experts(where)


def by_hand(folder, params, task):
    """Loss and accuracy of next tokens, and of the likeliest answer, one text at a time through `transformers`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    model.load_state_dict(dict(params), strict=False)
    model.tie_weights()
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")

    def tokens(text, skip):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            logp = model(ids).logits.log_softmax(-1)[0, :-1]
        return logp[skip:].gather(1, ids[0, 1 + skip :, None])[:, 0], (logp.argmax(-1) == ids[0, 1:])[skip:]

    said, hits, chosen = [], [], []
    for line in (folder / "data" / f"{task}.test.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "text" in row:
            found = tokens(row["text"], 0)
        else:
            before = len(tokenizer(row["prompt"])["input_ids"]) - 1
            each = [tokens(row["prompt"] + word, before) for word in row["choices"]]
            chosen.append(int(np.argmax([float(logp.mean()) for logp, _ in each])) == row["answer"])
            found = each[row["answer"]]
        said += found[0].tolist()
        hits += found[1].tolist()
    return -np.mean(said), 100 * np.mean(chosen if chosen else hits)


@pytest.mark.parametrize("task", ["pattern", "verbs"])
def test_judged_as_by_hand(folder, task):
    suite = load_suite(folder)
    base = open_checkpoint(suite.base)
    for checkpoint in (base, open_checkpoint(suite.task(task).expert, base)):
        params = {n: checkpoint.read(n) for n in checkpoint.infos}
        ((accuracy, loss),) = suite.judge(params, [task])
        expected = by_hand(folder, params, task)
        assert loss == pytest.approx(expected[0], rel=1e-4)
        assert accuracy == pytest.approx(expected[1])


def test_experts_learn_and_a_run_has_both_gaps(folder, call):
    shown = call("bench", folder, "--rules", "average,ode,steer:steps=4", "--orders", 1, "--samples", 16, "--json")
    result = shown.json()
    assert result["experts_loss"] < 0.8 * result["base_loss"]
    assert result["experts"] > result["base"]
    for row in result["rows"]:
        ends = result["base_loss"], result["experts_loss"]
        assert row["loss_gap"] == pytest.approx(100 * (ends[0] - row["loss"]) / (ends[0] - ends[1]))
    assert "loss gap" in call("bench", folder, "--rules", "average", "--orders", 1).ok().out
    scores = call("evaluate", folder / "experts" / "verbs", "--suite", folder, "--json").json()
    assert set(scores["tasks"]) == {"pattern", "verbs"}


def test_a_run_is_resumed_and_reported(folder, call, tmp_path):
    run = bench(folder, ["average"], orders=1, out=tmp_path / "run")
    again = bench(folder, ["average"], orders=1, out=tmp_path / "run", resume=True)
    assert again.as_json() == run.as_json()
    call("report", tmp_path / "run", "--out", tmp_path / "page.html").ok()


def test_checked(folder):
    rows = check_suite(folder)
    assert [(row["task"], row["classes"], row["train"], row["test"]) for row in rows] == [
        ("pattern", None, 24, 10),
        ("verbs", None, 24, 10),
    ]


@pytest.fixture
def broken(folder, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(folder, tmp_path / "suite")


def edit(folder, change):
    suite = json.loads((folder / "suite.json").read_text())
    change(suite)
    (folder / "suite.json").write_text(json.dumps(suite))


def test_a_missing_tokenizer(broken, call):
    (broken / "base" / "tokenizer.json").unlink()
    (broken / "base" / "tokenizer_config.json").unlink()
    assert "has no tokenizer that can be read" in call("suites", "check", broken).mistake()


def test_choices_of_equal_text(broken, call):
    lines = json.dumps({"prompt": "a dog ", "choices": ["runs", "runs"], "answer": 0}) + "\n"
    (broken / "data" / "verbs.test.jsonl").write_text(lines)
    assert "two of the choices are equal" in call("suites", "check", broken).mistake()


def test_a_context_longer_than_the_model_has(broken, call):
    edit(broken, lambda suite: suite.update(max_length=4096))
    assert "max_length is 4096" in call("suites", "check", broken).mistake()


def test_texts_longer_than_the_context_are_cut(broken):
    (broken / "data" / "pattern.test.jsonl").write_text(json.dumps({"text": "the red dog runs " * 20}) + "\n")
    assert load_suite(broken).samples("pattern", "test").labels.shape == (1, 16)


def test_an_adapter_of_another_base(broken, call):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    get_peft_model(other, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(broken / "experts" / "other")
    edit(broken, lambda suite: suite["tasks"][0].update(expert="experts/other"))
    assert "do not make an update of" in call("suites", "check", broken).mistake()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["tasks"][0].update(measure="choices"), "nothing in it asks for that"),
        (lambda s: s["tasks"][0].update(measure="luck"), "it is for language models: accuracy, exact, choices"),
        (lambda s: s["tasks"][0].update(head="head.safetensors"), "a language model needs none"),
        (lambda s: s.update(protocol="dil"), "has no shared head"),
        (lambda s: s.pop("max_length"), "needs the entry 'max_length'"),
    ],
)
def test_mistakes_in_the_description(broken, call, change, said):
    edit(broken, change)
    assert said in call("suites", "check", broken).mistake()


def test_what_is_for_encoders_is_refused(folder, tmp_path):
    with pytest.raises(OptionError, match="the tangent model is of an encoder"):
        finetune(load_suite(folder), "pattern", tmp_path / "x", Training(steps=1, tangent=True))


def test_samples_that_the_experts_write(folder, call, tmp_path):
    """The run calibrates on what `add --data self:N` would: no training text is read."""
    whole = shutil.copytree(folder, tmp_path / "suite")
    for file in (whole / "data").glob("*.train.jsonl"):
        file.unlink()
    how = ["--rules", "average,steer:steps=2", "--orders", 1, "--samples", 6, "--written"]
    call("bench", whole, *how, "--out", tmp_path / "run", "--json").ok()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["written"] is True
    objective = load_suite(whole).objective(["pattern", "verbs"], size=6, written=True)
    assert [len(task) for task in objective.pool] == [3, 3]
    assert "the begin token" in objective.pool[0].written
    assert "train.jsonl" in call("bench", whole, *how[:-1]).mistake()


def test_written_samples_need_a_language_model_and_a_text_each(folder, call):
    assert "only language models write texts" in call("bench", "digits", "--written").mistake()
    assert "at least one text" in call("bench", folder, "--written", "--samples", 1).mistake()
