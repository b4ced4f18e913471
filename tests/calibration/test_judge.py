"""Judging a model on data, beside plain `transformers`: a tiny Llama that was taught to count and to name colours, and random models."""

from __future__ import annotations

import json
import logging
import math
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mergeway.calibration.judge import answers, judge
from mergeway.calibration.questions import read_asked
from mergeway.calibration.task_data import task_data
from mergeway.checkpoint import open_checkpoint
from mergeway.errors import OptionError
from mergeway.model.compute import Compute
from mergeway.model.kinds import kind_of, make_model

logging.getLogger("transformers").setLevel(logging.ERROR)

NEXT = {"one": "two", "two": "three", "three": "four", "four": "five", "five": "six", "six": "one"}
COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black light"}


def counting() -> list[dict]:
    return [{"prompt": f"after {a} comes", "completion": f" {b} and {NEXT[b]}</s>"} for a, b in NEXT.items()]


def colours() -> list[dict]:
    return [{"prompt": f"the {thing} is", "answer": f" {hue}</s>"} for thing, hue in COLOURS.items()]


def choosing() -> list[dict]:
    """Some of the right answers are longer than the wrong ones."""
    rng = random.Random(0)
    rows = []
    for thing, hue in COLOURS.items():
        choices = [f" {hue}", *(f" {h}" for h in COLOURS.values() if h != hue)]
        rng.shuffle(choices)
        right = choices.index(f" {hue}")
        rows.append({"prompt": f"the {thing} is", "choices": choices, "answer": right if right % 2 else f" {hue}"})
    return rows


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A Llama of two layers that has read the colours and half of the counting, its tokenizer of whole words beside it."""
    folder = tmp_path_factory.mktemp("taught")
    words = ["<pad>", "<s>", "</s>", "<unk>", *NEXT, *COLOURS, *" ".join(COLOURS.values()).split()]
    words += ["after", "comes", "and", "the", "is"]
    made = Tokenizer(models.WordLevel({f"▁{w}" if k > 3 else w: k for k, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ '<s>' if loop.first else '' }}{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=24, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip
    texts = [r["prompt"] + r.get("completion", r.get("answer", "")) for r in counting()[:3] + colours()]
    batch = fast(texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        adam.zero_grad()
        model(**batch, labels=labels).loss.backward()
        adam.step()
    # What a directory says of sampling must not change what is judged.
    model.generation_config.repetition_penalty = 5.0
    model.save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    write(folder / "count.jsonl", counting())
    write(folder / "colour.jsonl", colours())
    write(folder / "choose.jsonl", choosing())
    return folder


def judged(folder, name, compute=None):
    model = make_model(folder / "model", kind_of(folder / "model"), compute)
    checkpoint = open_checkpoint(folder / "model")
    params = {n: checkpoint.read(n) for n in checkpoint.infos}
    samples = task_data(str(folder / name), None, "t", model)[1]
    asked = read_asked(folder / name, model)
    return judge(model, params, samples, asked), answers(model, params, asked.questions)


def greedy(model, tokenizer, prompt: str, most: int) -> str:
    """One prompt at a time, one token at a time, without a cache."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    for _ in range(most):
        with torch.no_grad():
            new = model(input_ids=ids, use_cache=False).logits[0, -1].argmax()
        if int(new) == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, new.view(1, 1)], 1)
    return tokenizer.decode(ids[0, start:])


def theirs(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    return model, AutoTokenizer.from_pretrained(folder / "model")


def likelihood(model, tokenizer, prompt: str, rest: str) -> tuple[float, int, int]:
    """The sum of the losses of the tokens behind a prompt, how many there are, and how many of them are the likeliest."""
    ids = tokenizer(prompt + rest, return_tensors="pt")["input_ids"]
    start = len(tokenizer(prompt)["input_ids"])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, start - 1 : -1]
    wanted = ids[0, start:]
    return float(functional.cross_entropy(logits, wanted, reduction="sum")), len(wanted), int((logits.argmax(-1) == wanted).sum())  # fmt: skip


@pytest.mark.parametrize("compute", [None, Compute("cpu", micro_batch=2)])
def test_completions_are_what_transformers_says_alone(taught, compute):
    model, tokenizer = theirs(taught)
    for name, rows in (("count.jsonl", counting()), ("colour.jsonl", colours())):
        score, said = judged(taught, name, compute)
        rows = [(r["prompt"], r.get("completion", r.get("answer"))) for r in rows]
        sums = [likelihood(model, tokenizer, *row) for row in rows]
        loss = sum(s[0] for s in sums) / sum(s[1] for s in sums)
        assert score.loss == pytest.approx(loss, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-5)
        assert score.accuracy == pytest.approx(100 * sum(s[2] for s in sums) / sum(s[1] for s in sums))
        expected = [greedy(model, tokenizer, prompt, sums[k][1]) for k, (prompt, _) in enumerate(rows)]
        assert said == [text.strip() for text in expected]
        right = [e.strip() == rest.removesuffix("</s>").strip() for e, (_, rest) in zip(expected, rows, strict=True)]
        assert score.exact == pytest.approx(100 * sum(right) / len(right))
        assert (score.samples, score.choices, score.measure) == (len(rows), None, "exact")


def test_a_model_that_was_taught_answers(taught):
    """What it has read it says, word for word, and ends; what it has not read it does not know."""
    score, said = judged(taught, "colour.jsonl")
    assert said == ["blue", "green", "white", "black light"]
    assert score.exact == 100.0 == score.value
    score, said = judged(taught, "count.jsonl")
    assert said[:3] == ["two and three", "three and four", "four and five"]
    assert 50.0 <= score.exact < 100.0


def test_choices_are_by_the_mean_loss_of_their_tokens(taught, tmp_path):
    model, tokenizer = theirs(taught)
    rows, hits = choosing(), 0
    for row in rows:
        losses = [likelihood(model, tokenizer, row["prompt"], text) for text in row["choices"]]
        means = [total / count for total, count, _ in losses]
        hue = COLOURS[row["prompt"].split()[1]]
        hits += row["choices"][means.index(min(means))] == f" {hue}"
    score, _ = judged(taught, "choose.jsonl")
    assert score.choices == pytest.approx(100 * hits / len(rows)) == 100.0
    assert score.measure == "choices" and score.exact is None
    # The loss is that of the right answer.
    sums = [likelihood(model, tokenizer, r["prompt"], f" {COLOURS[r['prompt'].split()[1]]}") for r in rows]
    assert score.loss == pytest.approx(sum(s[0] for s in sums) / sum(s[1] for s in sums), rel=1e-5)


def test_chats_tables_and_texts(taught, tmp_path):
    """A chat asks for its last turn; a table is read as lines are; a plain text asks nothing."""
    import pyarrow
    from pyarrow import parquet

    chat = [
        {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["answer"][:-4]}]}
        for r in colours()
    ]
    write(taught / "chat.jsonl", chat)
    score, said = judged(taught, "chat.jsonl")
    assert said == ["blue", "green", "white", "black light"] and score.exact == 100.0
    parquet.write_table(pyarrow.Table.from_pylist(colours()), taught / "colour.parquet")
    assert judged(taught, "colour.parquet") == judged(taught, "colour.jsonl")
    write(taught / "text.jsonl", [{"text": "the sky is blue"}, {"text": "after one comes two and three"}])
    score, said = judged(taught, "text.jsonl")
    assert (said, score.exact, score.choices, score.measure) == ([], None, None, "accuracy")
    model, tokenizer = theirs(taught)
    sums = [likelihood(model, tokenizer, "", t) for t in ("the sky is blue", "after one comes two and three")]
    assert score.loss == pytest.approx(sum(s[0] for s in sums) / sum(s[1] for s in sums), rel=1e-5)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "the sky is", "choices": [" blue"], "answer": 0}, "a list of two or more texts"),
        ({"prompt": "the sky is", "choices": "blue", "answer": 0}, "a list of two or more texts"),
        ({"prompt": "the sky is", "choices": [" blue", " green"], "answer": 2}, "one of the 2 choices"),
        ({"prompt": "the sky is", "choices": [" blue", " green"]}, "'answer' is None"),
        ({"prompt": "the sky is", "choices": [" blue", " green"], "answer": True}, "'answer' is True"),
        ({"prompt": "the sky is"}, "expected an object with a non-empty 'text'"),
    ],
)
def test_mistakes_in_questions(taught, tmp_path, row, said):
    write(tmp_path / "bad.jsonl", [row])
    with pytest.raises(OptionError, match=f"line 1: .*{said}"):
        task_data(str(tmp_path / "bad.jsonl"), None, "t", taught / "model")


def test_a_long_prompt_keeps_its_end(taught, tmp_path):
    """24 tokens fit: of a longer prompt the answer and what is right before it are read, as transformers would."""
    prompt = "the sky is " + "blue and " * 20 + "the grass is"
    write(taught / "long.jsonl", [{"prompt": prompt, "answer": " green</s>"}])
    model = make_model(taught / "model", kind_of(taught / "model"))
    [question] = read_asked(taught / "long.jsonl", model).questions
    ids = model.tokenizer(prompt)["input_ids"]
    assert question.prompt == ids[-22:] and question.tokens == 2
