"""Suites small enough for a test: a vision tower or a text encoder of a few thousand numbers, its experts, data and heads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

SIDE, WIDTH, CLASSES = 8, 8, 3
SCALE = 10.0
TASKS = ("ants", "bees", "cats")


def vision_suite(folder: Path, tasks: tuple[str, ...] = TASKS, train: int = 24, test: int = 20) -> Path:
    """A suite of kind clip-vision; most labels are what the task's expert says, so experts beat the base."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=4,
        projection_dim=WIDTH,
    )
    model = CLIPVisionModelWithProjection(config).eval()
    _save(model, folder / "base")
    base = {n: t.clone() for n, t in model.state_dict().items()}
    rows = []
    for number, task in enumerate(tasks):
        generator = torch.Generator().manual_seed(number + 1)
        moved = {n: t + 0.15 * torch.randn(t.shape, generator=generator) for n, t in base.items() if t.ndim == 2}
        # Projection and positions stay as they are, as when only the tower is tuned.
        model.load_state_dict(base | {n: t for n, t in moved.items() if "encoder" in n})
        _save(model, folder / "experts" / task)
        head = functional.normalize(torch.randn(CLASSES, WIDTH, generator=generator), dim=-1)
        _save_head(folder / "heads" / f"{task}.safetensors", head)
        arrays = {}
        for split, count in (("train", train), ("test", test)):
            x = torch.randint(0, 256, (count, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
            y = torch.randint(0, CLASSES, (count,), generator=generator)
            pixels = (x.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
            with torch.no_grad():
                y[: 3 * count // 4] = (model(pixel_values=pixels).image_embeds @ head.mT).argmax(-1)[: 3 * count // 4]
            arrays |= {f"x_{split}": x.numpy(), f"y_{split}": y.numpy()}
        (folder / "data").mkdir(exist_ok=True)
        np.savez(folder / "data" / f"{task}.npz", **arrays)
        rows.append(_row(task) | {"data": f"data/{task}.npz"})
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return _describe(folder, "clip-vision", rows, settings)


WORDS = ["red", "blue", "green", "dog", "cat", "bird", "runs", "sleeps", "sings", "the", "a"]


def text_suite(folder: Path, tasks: tuple[str, ...] = ("colour", "animal"), train: int = 12, test: int = 9) -> Path:
    """A suite of kind text-encoder with a tokenizer of eleven words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {word: k for k, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    model = BertModel(config).eval()
    _save(model, folder / "base")
    fast.save_pretrained(folder / "base")
    base = {n: t.clone() for n, t in model.state_dict().items()}
    rows = []
    for number, task in enumerate(tasks):
        rng = np.random.default_rng(number)
        generator = torch.Generator().manual_seed(number + 1)
        model.load_state_dict(
            {n: t + 0.1 * torch.randn(t.shape, generator=generator) if t.ndim == 2 else t for n, t in base.items()}
        )
        _save(model, folder / "experts" / task)
        head = functional.normalize(torch.randn(CLASSES, WIDTH, generator=generator), dim=-1)
        _save_head(folder / "heads" / f"{task}.safetensors", head)
        (folder / "data").mkdir(exist_ok=True)
        for split, count in (("train", train), ("test", test)):
            lines = []
            for _ in range(count):
                picked = rng.integers(0, 3, 3)
                text = " ".join(["the", WORDS[picked[0]], WORDS[3 + picked[1]], WORDS[6 + picked[2]]])
                lines.append(json.dumps({"text": text, "label": int(picked[number % 3])}))
            (folder / "data" / f"{task}.{split}.jsonl").write_text("\n".join(lines) + "\n")
        rows.append(_row(task) | {"data": f"data/{task}"})
    return _describe(folder, "text-encoder", rows, {"max_length": 8, "pooling": "mean"})


def llama(tied: bool = False) -> torch.nn.Module:
    """A causal language model with grouped attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
        )
    )


TALES = ("sea", "wood", "town")


def language_stream(folder: Path) -> Path:
    """A random GPT-2 of eleven words as `base`, three arrivals and texts for each, `sea.jsonl` and so on."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = {word: k for k, word in enumerate(["<pad>", "<begin>", "<end>", *WORDS])}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<begin>", eos_token="<end>", unk_token="<pad>"
    )
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(words), bos_token_id=1, eos_token_id=2, **sizes)).eval()
    with torch.no_grad():  # as sure of itself as a model that has learned something
        model.transformer.wte.weight.mul_(20)
    base = {n: t.clone() for n, t in model.state_dict().items()}
    # What a directory says of generation is not heard: samples are drawn at temperature 1 from all tokens.
    model.generation_config.update(temperature=0.01, top_k=1, repetition_penalty=3.0, do_sample=True)
    _save(model, folder / "base")
    fast.save_pretrained(folder / "base")
    for number, task in enumerate(TALES):
        generator = torch.Generator().manual_seed(number + 1)
        moved = {n: t + 0.3 * torch.randn(t.shape, generator=generator) if t.ndim == 2 else t for n, t in base.items()}
        model.load_state_dict(moved | {"lm_head.weight": moved["transformer.wte.weight"]})
        _save(model, folder / task)
        rng = np.random.default_rng(number)
        texts = [" ".join(["<begin>", *rng.choice(WORDS, rng.integers(3, 9))]) for _ in range(12)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def words_tokenizer(folder: Path) -> int:
    """A tokenizer of eleven words and three special tokens, written to a directory; how many tokens it knows."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {word: k for k, word in enumerate(["[PAD]", "[UNK]", "[END]", *WORDS])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]"
    ).save_pretrained(folder)
    return len(words)


def language_suite(folder: Path, train: int = 24, test: int = 10) -> Path:
    """A suite of kind causal-lm without experts: texts of a pattern, and a choice whose answer follows from the prompt."""
    model = llama(tied=True)
    _save(model, folder / "base")
    words_tokenizer(folder / "base")
    (folder / "data").mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("test", test)):
        texts, asked = [], []
        for k in rng.integers(0, 3, count):
            texts.append({"text": f"the {WORDS[k]} {WORDS[3 + k]} {WORDS[6 + k]} the {WORDS[k]}"})
            asked.append({"prompt": f"a {WORDS[3 + k]} ", "choices": WORDS[6:9], "answer": int(k)})
        for task, rows in (("pattern", texts), ("verbs", asked)):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "data" / f"{task}.{split}.jsonl").write_text(lines)
    rows = [{"name": task, "data": f"data/{task}"} for task in ("pattern", "verbs")]
    suite = {"name": "tiny-lm", "kind": "causal-lm", "base": "base", "max_length": 16, "tasks": rows}
    (folder / "suite.json").write_text(json.dumps(suite, indent=1))
    return folder


def with_experts(folder: Path) -> Path:
    """The same suite, its tasks naming what lies in experts/."""
    suite = json.loads((folder / "suite.json").read_text())
    for row in suite["tasks"]:
        row["expert"] = f"experts/{row['name']}"
    (folder / "suite.json").write_text(json.dumps(suite, indent=1))
    return folder


def backbone_suite(folder: Path, pooling: str = "cls", train: int = 24, test: int = 20) -> Path:
    """A suite of kind image-encoder on a backbone trained at another size, without experts; bright pictures are class 1."""
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    model = Dinov2Model(
        Dinov2Config(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4)
    )
    _save(model.eval(), folder / "base")
    (folder / "data").mkdir()
    rows = []
    for number, task in enumerate(("bright", "red")):
        generator = torch.Generator().manual_seed(number)
        arrays = {}
        for split, count in (("train", train), ("test", test)):
            y = torch.randint(0, 2, (count,), generator=generator)
            x = torch.randint(0, 128, (count, SIDE, SIDE, 3), generator=generator)
            x[..., 0 if number else slice(None)] += 127 * y.view(-1, *([1] * (2 if number else 3)))
            arrays |= {f"x_{split}": x.to(torch.uint8).numpy(), f"y_{split}": y.numpy()}
        np.savez(folder / "data" / f"{task}.npz", **arrays)
        head = functional.normalize(torch.randn(2, WIDTH, generator=generator), dim=-1)
        _save_head(folder / "heads" / f"{task}.safetensors", head)
        rows.append({"name": task, "data": f"data/{task}.npz", "head": f"heads/{task}.safetensors"})
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_size": SIDE, "pooling": pooling}
    return _describe(folder, "image-encoder", rows, settings)


def per_sample_fisher(suite, task: str, model: Path | None = None) -> dict[str, torch.Tensor]:
    """Mean squared gradient, one sample at a time, with the module's own parameters and nothing of ours but the data."""
    from transformers import CLIPVisionModelWithProjection

    model = CLIPVisionModelWithProjection.from_pretrained(model or suite.task(task).expert)
    samples = suite.samples(task, "train")
    squares = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for image, label in zip(samples.inputs["images"], samples.labels, strict=True):
        model.zero_grad()
        pixels = (image.permute(2, 0, 1)[None].float() / 255 - 0.5) / 0.5
        features = model(pixel_values=pixels).image_embeds
        logits = SCALE * (features / features.norm()) @ samples.head.mT
        (-logits.log_softmax(-1)[0, label]).backward()
        for n, p in model.named_parameters():
            squares[n] += p.grad**2 / len(samples.labels)
    return {n: s.detach() for n, s in squares.items()}


def _save(model: torch.nn.Module, folder: Path) -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.save_pretrained(folder)


def _save_head(path: Path, head: torch.Tensor) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(exist_ok=True)
    save_file({"weight": head}, path)


def _row(task: str) -> dict[str, str]:
    return {"name": task, "expert": f"experts/{task}", "head": f"heads/{task}.safetensors"}


def _describe(folder: Path, kind: str, rows: list, settings: dict) -> Path:
    suite = {"name": "tiny", "kind": kind, "base": "base", "logit_scale": SCALE, **settings, "tasks": rows}
    (folder / "suite.json").write_text(json.dumps(suite, indent=1))
    return folder
