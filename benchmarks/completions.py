"""A small Llama that completes prompts: exact match of the base, of its three experts and of their merges.

Letters are tokens, and the tokenizer writes a begin token before every text, as Llama's does. Three tasks turn three to five letters into
others: back to front, in the order of the alphabet, each letter moved on by one. The base has seen a little of all three, each
expert one of them. Rules with data get 256 training prompts of each task with their completions, by `add --data`; what is counted
are greedy completions of prompts that nobody was trained on.

    python benchmarks/completions.py [--out DIR] [--rules average,iso,steer,steer#end] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import mergeway as mw

LETTERS = "abcdefghijklmnop"
TASKS: dict[str, Callable[[str], str]] = {
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "shift": lambda word: "".join(LETTERS[(LETTERS.index(c) + 1) % len(LETTERS)] for c in word),
}
SIGNS = {"reverse": "<", "sort": "/", "shift": "+"}
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TRAIN, GIVEN, TEST = 6000, 256, 300


def rows(task: str, count: int, seed: str) -> list[dict[str, str]]:
    """Prompts such as `abc<` with their completions."""
    draw = random.Random(f"{task} {seed}")
    words = ["".join(draw.choice(LETTERS) for _ in range(draw.randint(3, 5))) for _ in range(count)]
    return [{"prompt": word + SIGNS[task], "completion": TASKS[task](word)} for word in words]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, with a begin token before every text and no end token after it."""
    signs = ["<pad>", "<s>", "</s>", *LETTERS, *SIGNS.values()]
    made = Tokenizer(models.WordLevel({sign: k for k, sign in enumerate(signs)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def train(model: LlamaForCausalLM, data: list[dict[str, str]], steps: int, rate: float, seed: int) -> None:
    """Adam on the completions, by the loss of `transformers`; each ends with the end token, as most training scripts have it."""
    tokenizer, draw = make_tokenizer(), random.Random(seed)
    adam = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    model.train()
    for step in range(steps):
        for group in adam.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        batch = draw.sample(data, 64)
        texts = tokenizer([r["prompt"] + r["completion"] + "</s>" for r in batch], padding=True, return_tensors="pt")
        labels = texts["input_ids"].masked_fill(texts["attention_mask"] == 0, -100)
        for line, row in zip(labels, batch, strict=True):
            line[: 1 + len(row["prompt"])] = -100
        model(input_ids=texts["input_ids"], attention_mask=texts["attention_mask"], labels=labels).loss.backward()
        adam.step()
        adam.zero_grad()


def taught(task: str, about: str, seed: int) -> list[dict[str, str]]:
    """Rows to train on; held-out prompts are not among them."""
    held = {row["prompt"] for row in rows(task, TEST, f"test {seed}")}
    return [row for row in rows(task, TRAIN, f"{about} {seed}") if row["prompt"] not in held]


def make_models(out: Path, seed: int) -> None:
    """The base and the experts, with data for `--data` and held-out prompts beside them; what is there stays."""
    tokenizer = make_tokenizer()
    if not (out / "base" / "config.json").exists():
        torch.manual_seed(seed)
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=24, **special, **SIZE))
        train(base, [row for task in TASKS for row in taught(task, "base", seed)], 110, 2e-3, seed)
        base.save_pretrained(out / "base")
        tokenizer.save_pretrained(out / "base")
    for task in TASKS:
        own = taught(task, "train", seed)
        for name, data in (("given", own[:GIVEN]), ("test", rows(task, TEST, f"test {seed}"))):
            (out / f"{task}.{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        if not (out / task / "config.json").exists():
            expert = LlamaForCausalLM.from_pretrained(out / "base")
            train(expert, own, 300, 2e-3, seed + 1)
            expert.save_pretrained(out / task)


def judged(ref: object, out: Path) -> dict[str, float]:
    """Exact match on the held-out prompts of each task, in percent."""
    return {task: score.exact or 0.0 for task, score in mw.evaluate(ref, tests(out), base=out / "base").items()}


def tests(out: Path) -> dict[str, str]:
    return {task: str(out / f"{task}.test.jsonl") for task in TASKS}


def merged(out: Path, label: str, where: Path) -> dict[str, float]:
    """The stream of the three experts through a trunk, as `add --data` does it; words behind `#` go behind the file."""
    rule, mark, words = label.partition("#")
    trunk = mw.Trunk.create(where, out / "base", rule)
    for task in TASKS:
        data = f"{out / task}.given.jsonl{mark}{words}" if trunk.rule.needs else None
        trunk.add(out / task, task, data=data)
    return {task: score.exact or 0.0 for task, score in trunk.evaluate(tests(out)).items()}


def main() -> None:
    """Make what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where models go; what is there is used again")
    parser.add_argument("--rules", default="average,iso,steer,steer#end", help="with a word on texts behind #")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        out = given.out or Path(scratch) / "models"
        out.mkdir(parents=True, exist_ok=True)
        make_models(out, given.seed)
        print(f"| | {' | '.join(TASKS)} | mean |\n|---|{'---|' * (len(TASKS) + 1)}")
        show("base", judged(out / "base", out))
        for rule in given.rules.split(","):
            show(rule, merged(out, rule, Path(scratch) / rule))
        show("experts", {task: judged(out / task, out)[task] for task in TASKS})


def show(name: str, found: dict[str, float]) -> None:
    """One row of the table."""
    cells = " | ".join(f"{found[task]:.1f}" for task in TASKS)
    print(f"| {name} | {cells} | {sum(found.values()) / len(found):.1f} |", flush=True)


if __name__ == "__main__":
    main()
