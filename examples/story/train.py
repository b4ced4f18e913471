"""A training script as you may have one: a small BERT learns one thing about sentences, and every run is offered to a trunk.

    python train.py base                          the base, and held-out sentences of every task
    python train.py colour                        a run on one task; what it saves last is folded into the trunk
    python train.py animal --learning-rate 0.3    a run that goes wrong

The trunk is the directory `trunk`.
"""

import argparse
import json
import random
from itertools import product
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    ProgressCallback,
    Trainer,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

import mergeway as mw

WORDS = {
    "colour": ["red", "blue", "green"],
    "animal": ["dog", "cat", "bird"],
    "deed": ["runs", "sleeps", "sings"],
}


def sentences(task: str, count: int, seed: int) -> list[dict]:
    """Sentences such as "the red dog sleeps", with which of the task's three words is in them."""
    draw = random.Random(f"{task} {seed}")
    rows = []
    for _ in range(count):
        picked = {about: draw.randrange(3) for about in WORDS}
        text = " ".join(["the", *(WORDS[about][picked[about]] for about in WORDS)])
        rows.append({"text": text, "label": picked[task]})
    return rows


def make_base() -> None:
    """A BERT of two layers that knows the words, `bert`, and one file of held-out sentences for each task."""
    words = ["[PAD]", "[UNK]", "the", *(word for group in WORDS.values() for word in group)]
    made = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained("bert")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    size |= {"vocab_size": len(words), "max_position_embeddings": 16}
    size |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(num_labels=9, **size))
    tokens = torch.tensor([tokenizer(" ".join(["the", *picked]))["input_ids"] for picked in product(*WORDS.values())])
    labels = torch.tensor(list(product(range(3), repeat=3)))
    # One model learns all three at once; what it knows of the sentences is the base, its head is not.
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.002)
    for _ in range(250):
        answers = model(input_ids=tokens).logits.view(27, 3, 3)
        functional.cross_entropy(answers.mT, labels).backward()
        optimiser.step()
        optimiser.zero_grad()
    base = BertForSequenceClassification(BertConfig(num_labels=3, **size))
    base.bert.load_state_dict(model.bert.state_dict())
    base.save_pretrained("bert")
    Path("held-out").mkdir()
    for task in WORDS:
        lines = [json.dumps(row) for row in sentences(task, 60, seed=1)]
        Path("held-out", f"{task}.jsonl").write_text("\n".join(lines) + "\n")


def train(task: str, learning_rate: float) -> mw.integrations.FoldCallback:
    """One run, offered to the trunk; a fold that costs an earlier task more than five points is refused."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained("bert")
    rows = [tokenizer(row["text"]) | {"labels": row["label"]} for row in sentences(task, 200, seed=0)]
    arguments = TrainingArguments(
        f"runs/{task}",
        max_steps=60,
        per_device_train_batch_size=16,
        learning_rate=learning_rate,
        save_strategy="steps",
        save_steps=60,
        logging_steps=30,
        report_to=[],
        use_cpu=True,
    )
    model = BertForSequenceClassification.from_pretrained("bert")
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trunk = mw.Trunk.open("trunk")
    judged = [*(held.task for held in trunk.folded()), task]
    check = {name: f"held-out/{name}.jsonl" for name in judged}
    fold = mw.integrations.FoldCallback(trunk, trainer=trainer, check=check, max_drop=5.0)
    trainer.add_callback(fold)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    return fold


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["base", *WORDS])
    parser.add_argument("--learning-rate", type=float, default=0.001)
    asked = parser.parse_args()
    disable_progress_bar()
    if asked.what == "base":
        make_base()
    else:
        done = train(asked.what, asked.learning_rate)
        print(f"folded as step {done.record.step}" if done.record else done.refused)
