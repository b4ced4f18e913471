"""Tiny streams of every kind of model: plain tensors, an encoder, a classifier with a head for each task, adapters, tied weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from safetensors.torch import load_file, save_file
from shared import Tensors, draw_tensors

from mergeway import Objective, Trunk
from mergeway.calibration.task_data import task_data
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.heads import head_of, head_pattern
from mergeway.rules import RULES, ModelRule, WantsGrams

# Fewer steps for the rules that search; everything else, and a rule of another package, at its defaults.
QUICK: dict[str, dict[str, Any]] = {"dop": {"steps": 3}, "ode": {"step": 0.25}, "steer": {"steps": 2}}
WEIGHTS = [1.0, 2.5, 0.5]
CLASSES = {"hue": 2, "side": 3, "x-v1.5": 4}


@dataclass(frozen=True)
class Kind:
    """A base, arrivals and what is known of their tasks: a data file for each, or nothing but moments."""

    base: Path
    arrivals: list[Path]
    names: list[str]
    data: list[str] = field(default_factory=list)
    moments: list[Tensors] = field(default_factory=list)

    @property
    def weights(self) -> list[float]:
        return WEIGHTS[: len(self.arrivals)]

    @cached_property
    def tensors(self) -> Tensors:
        """Those of the base."""
        return load_file(self.base) if self.base.is_file() else weights_in(self.base)

    def allows(self, rule: str) -> bool:
        """Gram matrices are taken from the layers of a model, and plain tensors have none."""
        return bool(self.data) or not issubclass(RULES[rule], WantsGrams)

    @cached_property
    def objective(self) -> Objective:
        """The loss of all tasks on their data, each under the head that came with its arrival."""
        base = open_checkpoint(self.base)
        pattern = head_pattern(base, None)
        model: Any = self.base
        samples = []
        for data, task, arrival in zip(self.data, self.names, self.arrivals, strict=True):
            own = head_of(open_checkpoint(arrival, base), pattern).tensors if pattern else None
            model, found = task_data(data, None, task, model, own)
            samples.append(found)
        return Objective(model, samples)

    def for_stream(self, rule: str) -> dict[str, Any]:
        """What a whole stream takes besides its checkpoints."""
        needs = RULES[rule].needs
        if "moments" in needs and self.moments:
            return {"moments": self.moments}
        if not needs:
            return {}
        return {"objective": self.objective if self.data else pull(self.base)}

    def for_add(self, rule: str, k: int) -> dict[str, Any]:
        """What the k-th arrival takes besides its checkpoint."""
        needs = RULES[rule].needs
        if "moments" in needs and self.moments:
            return {"moments": self.moments[k]}
        if not needs:
            return {}
        if self.data:
            return {"data": self.data[k]}
        assert issubclass(RULES[rule], ModelRule)
        return {"objective": pull(self.base)}

    def grown(self, path: Path, rule: str, count: int | None = None, **options: Any) -> Trunk:
        """A trunk that is opened anew for every arrival."""
        Trunk.create(path, self.base, rule, keep=9, **{**QUICK.get(rule, {}), **options})
        for k, arrival in enumerate(self.arrivals[:count]):
            Trunk.open(path).add(arrival, weight=WEIGHTS[k], **self.for_add(rule, k))
        return Trunk.open(path)


def weights_in(folder: Path) -> Tensors:
    """All tensors of a model directory."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def heads_in(folder: Path) -> dict[str, bytes]:
    """The files of the tasks' heads beside a model."""
    return {path.name: path.read_bytes() for path in (folder / "heads").glob("*")}


def bits(model: Tensors) -> dict[str, str]:
    """A digest for each tensor, which tells 0.0 from −0.0."""
    return {
        n: f"{t.dtype} {list(t.shape)} {hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()}"
        for n, t in model.items()
    }


def pull(base: Path) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """A cheap loss: half the squared distance from a point a little away from the base."""
    goal = {n: t.float() + 0.1 for n, t in load_file(base).items() if t.is_floating_point()}
    return lambda params: 0.5 * sum(((p.float() - goal[n]) ** 2).sum() for n, p in params.items())


def plain(folder: Path) -> Kind:
    """Tensors in files, without a config; half precision, with a buffer."""
    buffer = {"position_ids": torch.arange(5)}
    first = draw_tensors(0)
    models = [first, *({n: t + 0.05 * draw_tensors(k)[n] for n, t in first.items()} for k in (1, 2, 3))]
    names = ["base", "task1", "task2", "x-v1.5"]
    for name, model in zip(names, models, strict=True):
        save_file({n: t.bfloat16() for n, t in model.items()} | buffer, folder / f"{name}.safetensors")
    paths = [folder / f"{name}.safetensors" for name in names]
    moments = [{n: t.square() for n, t in draw_tensors(10 + k).items()} for k in (1, 2, 3)]
    return Kind(paths[0], paths[1:], names[1:], moments=moments)


def encoder(folder: Path) -> Kind:
    """A vision tower with the frozen heads and the data of a suite."""
    tiny.vision_suite(folder, train=8, test=2)
    return Kind(
        folder / "base", [folder / "experts" / t for t in tiny.TASKS], list(tiny.TASKS), _suite(folder, tiny.TASKS)
    )


def lora(folder: Path) -> Kind:
    """Adapters of the same tower, made by peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPVisionModelWithProjection

    tiny.vision_suite(folder, train=8, test=2)
    tasks = tiny.TASKS[:2]
    for seed, task in enumerate(tasks):
        torch.manual_seed(seed)
        model = CLIPVisionModelWithProjection.from_pretrained(folder / "base")
        tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc1"]))
        for name, parameter in tuned.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        tuned.save_pretrained(folder / "adapters" / task)
    return Kind(folder / "base", [folder / "adapters" / t for t in tasks], list(tasks), _suite(folder, tasks))


def classifier(folder: Path) -> Kind:
    """Image classifiers with heads of two, three and four classes over one tower; one is a snapshot of its training run."""
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    base = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=2, **size))
    tiny._save(base, folder / "base")
    arrivals, data = [], []
    for seed, (task, classes) in enumerate(CLASSES.items(), 1):
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=classes, **size))
        changed = {n: t + 0.1 * torch.randn(t.shape) for n, t in base.state_dict().items() if "classifier" not in n}
        model.load_state_dict(changed, strict=False)
        arrivals.append(folder / task / "checkpoint-96" if task == "side" else folder / task)
        tiny._save(model, arrivals[-1])
        data.append(str(folder / f"{task}.npz"))
        np.savez(data[-1], x=rng.integers(0, 256, (8, 8, 8, 3), dtype=np.uint8), y=np.arange(8) % classes)
    return Kind(folder / "base", arrivals, list(CLASSES), data)


def tied(folder: Path) -> Kind:
    """A language model whose output layer is its embedding, stored under both names or one."""
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    tiny._save(tiny.llama(tied=True), folder / "base")
    _tokenizer().save_pretrained(folder / "base")
    first = load_file(folder / "base" / "model.safetensors")
    save_file({**first, output: first[embedding].clone()}, folder / "base" / "model.safetensors", {"format": "pt"})
    arrivals, data = [], []
    for seed, task in enumerate(("sea", "wood"), 1):
        generator = torch.Generator().manual_seed(seed)
        model = {n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in first.items()}
        if task == "sea":
            model[output] = model[embedding].clone()
        arrivals.append(folder / task)
        arrivals[-1].mkdir()
        save_file(model, arrivals[-1] / "model.safetensors", {"format": "pt"})
        (arrivals[-1] / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
        lines = [{"text": f"the {a} {task} sees the {b}"} for a in ("red", "blue") for b in ("dog", "cat")]
        data.append(str(folder / f"{task}.jsonl"))
        Path(data[-1]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Kind(folder / "base", arrivals, ["sea", "wood"], data)


KINDS: dict[str, Callable[[Path], Kind]] = {
    "plain": plain,
    "encoder": encoder,
    "classifier": classifier,
    "lora": lora,
    "tied": tied,
}


def _suite(folder: Path, tasks: tuple[str, ...]) -> list[str]:
    return [f"{folder}#{task}" for task in tasks]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "<unk>", "the", "red", "blue", "sea", "wood", "sees", "dog", "cat"]
    made = Tokenizer(WordLevel({w: k for k, w in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
