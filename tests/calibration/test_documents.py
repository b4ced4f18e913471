"""Text for causal language models, tokenised by small tokenizers trained here: the objective is the loss `transformers` reports."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import mergeway as mw
from mergeway.calibration.memory import Bounds, CalibrationMemory
from mergeway.calibration.samples import MASKED
from mergeway.calibration.statistics import fisher_diagonal, gram_matrices
from mergeway.calibration.task_data import task_data
from mergeway.errors import OptionError

logging.getLogger("transformers").setLevel(logging.ERROR)

TEXTS = [
    "A ship sails.",
    "The gull cries over the salt waves near the harbour, and the ship answers with its bell.",
    "Oak, moss and fern.",
    "The tram stops at the old clock; a deer looks at it for a while and goes back into the wood.",
    "Salt.",
    "The waves are high today, said the captain of the ship.",
    "A fern grows near the clock.",
]


def tokenizer(begins: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE; with `begins` it puts <s> before a text, as Llama's does, and never an end after it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ '<s>' if loop.first else '' }}{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    return fast


@pytest.fixture(params=["llama", "gpt2"])
def base(request, tmp_path):
    """A random model with its tokenizer beside it; texts of more than 24 tokens do not fit."""
    torch.manual_seed(0)
    if request.param == "llama":
        config = LlamaConfig(
            vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=24, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=300, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=2,
            )
        )  # fmt: skip
    model.save_pretrained(tmp_path / "base")
    tokenizer(request.param == "llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(base, rows):
    return task_data(write(base.parent / "d.jsonl", rows), None, "t", base)


def own_params(base) -> dict[str, torch.Tensor]:
    return load_file(base / "model.safetensors")


def test_the_objective_is_the_loss_that_transformers_reports(base):
    model, samples = read(base, [{"text": text} for text in TEXTS])
    theirs = AutoModelForCausalLM.from_pretrained(base).eval()
    batch = model.tokenizer(
        TEXTS, padding=True, truncation=True, max_length=24, return_tensors="pt", return_token_type_ids=False
    )
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    expected = theirs(**batch, labels=labels).loss.item()
    for rows in (2, 3, 100):
        found = mw.Objective(model, [samples], batch=rows).task_losses(own_params(base))["t"]
        assert found == pytest.approx(expected, abs=1e-5)


def test_samples_are_documents_as_the_tokenizer_makes_them(base):
    model, samples = read(base, [{"text": text} for text in TEXTS])
    assert len(samples) == len(TEXTS)
    for row, text in enumerate(TEXTS):
        ids = samples.inputs["input_ids"][row][samples.mask[row].bool()].tolist()
        assert ids == model.tokenizer(text)["input_ids"][:24]
        assert model.tokenizer.eos_token_id not in ids
        assert (samples.labels[row][samples.mask[row] == 0] == MASKED).all()
    # An end that the text itself has is asked for like any other token.
    _, ended = read(base, [{"text": "Salt.</s>"}])
    assert ended.labels[0, -1] == model.tokenizer.eos_token_id


def test_prompts_and_other_turns_are_read_but_not_judged(base):
    rows = [
        {"prompt": "The gull", "completion": " cries."},
        {"messages": [{"role": "user", "content": "Oak?"}, {"role": "assistant", "content": "Moss."}]},
    ]
    model, samples = read(base, rows)
    judged = [model.tokenizer.decode([i for i in row.tolist() if i != MASKED]) for row in samples.labels]
    assert judged == [" cries.", "Moss.</s>"]
    whole = [model.tokenizer.decode(samples.inputs["input_ids"][k][samples.mask[k].bool()]) for k in range(2)]
    begin = "<s>" if "Llama" in type(model.module).__name__ else ""
    assert whole == [f"{begin}The gull cries.", "<s>u:Oak?</s>a:Moss.</s>"]


@pytest.mark.parametrize("words", ["", "#begin", "#no-begin", "#end", "#no-begin,end", "#begin,end"])
def test_how_texts_begin_and_end_is_an_option(base, words):
    """The ids are written out by hand from those without special tokens; the loss is that of `transformers` on them."""
    rows = [{"text": TEXTS[0]}, {"prompt": "The gull", "completion": " cries."}, {"text": "Salt.</s>"}]
    place = write(base.parent / "d.jsonl", rows)
    model, samples = task_data(place + words, None, "t", base)
    begins = "no-begin" not in words and ("begin" in words or "Llama" in type(model.module).__name__)
    theirs = AutoModelForCausalLM.from_pretrained(base).eval()
    losses, counts = [], []
    for k, text in enumerate([TEXTS[0], "The gull cries.", "Salt."]):
        bare = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        wanted = [1] * begins + bare + [2] * ("end" in words or k == 2)
        assert samples.inputs["input_ids"][k][samples.mask[k].bool()].tolist() == wanted
        labels = torch.tensor([wanted])
        given = begins + len(model.tokenizer("The gull", add_special_tokens=False)["input_ids"]) if k == 1 else begins
        labels[:, :given] = -100
        losses.append(theirs(input_ids=torch.tensor([wanted]), labels=labels).loss.item())
        counts.append(int((labels[:, 1:] != -100).sum()))
    expected = sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts)
    assert mw.Objective(model, [samples]).task_losses(own_params(base))["t"] == pytest.approx(expected, abs=1e-5)


def test_unknown_words_on_texts_are_a_mistake(base):
    place = write(base.parent / "d.jsonl", [{"text": "Salt."}])
    with pytest.raises(OptionError, match=r"'ends' says nothing of how texts begin or end; .*end"):
        task_data(place + "#ends", None, "t", base)
    with pytest.raises(OptionError, match="give one of them"):
        task_data(place + "#begin,no-begin", None, "t", base)


def test_what_has_nothing_to_predict_is_left_out_or_refused(base):
    long = {"prompt": "waves " * 40, "completion": "salt"}
    _, samples = read(base, [long, {"text": "A ship sails."}])
    assert len(samples) == 1
    with pytest.raises(OptionError, match="nothing to predict within 24 tokens"):
        read(base, [long])


def test_padding_is_no_input(base):
    """Statistics of padded texts are those of each text by itself."""
    model, samples = read(base, [{"text": text} for text in TEXTS[:4]])
    params = own_params(base)
    alone = [read(base, [{"text": text}])[1] for text in TEXTS[:4]]
    grams = gram_matrices(model, params, samples)
    tokens = [int(one.mask.sum()) for one in alone]
    for name, gram in grams.items():
        each = [gram_matrices(model, params, one)[name] * n for one, n in zip(alone, tokens, strict=True)]
        torch.testing.assert_close(gram, sum(each) / sum(tokens), rtol=1e-4, atol=1e-6)
    squares = fisher_diagonal(model, params, samples)
    parts = [fisher_diagonal(model, params, one) for one in alone]
    for name, square in squares.items():
        torch.testing.assert_close(square, sum(p[name] for p in parts) / 4, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("rule", ["ode", "steer", "fisher"])
def test_streams_of_documents(base, tmp_path, rule):
    """Every rule with data takes texts of many lengths; what a trunk remembers of them comes back as it was."""
    options = {"steps": 2} if rule == "steer" else {}
    trunk = mw.Trunk.create(tmp_path / "trunk", base, rule, memory=Bounds(8, copies=1), **options)
    origin = own_params(base)
    for number, task in enumerate(("a", "b")):
        generator = torch.Generator().manual_seed(number)
        moved = {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in origin.items()}
        (tmp_path / task).mkdir()
        save_file(moved, tmp_path / task / "model.safetensors")
        texts = TEXTS[number::2]
        trunk.add(tmp_path / task, data=write(tmp_path / f"{task}.jsonl", [{"text": t} for t in texts]))
    assert all(torch.isfinite(t).all() for t in trunk.params().values())
    if rule != "fisher":
        held = CalibrationMemory.read(trunk.path / "steps" / "000002")
        assert held is not None
        fresh = task_data(str(tmp_path / "b.jsonl"), None, "b", base)[1]
        rows = sorted(map(tuple, fresh.trimmed().labels.tolist()))
        assert sorted(map(tuple, held.tasks[1].trimmed().labels.tolist())) == rows
